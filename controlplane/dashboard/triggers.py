"""Jobs that a person starts from a page. Asking for what runs already joins it."""

from __future__ import annotations

from controlplane.fleet.models import Island
from controlplane.jobs import services as jobs
from controlplane.jobs.models import Job
from controlplane.registry.errors import WrongState
from controlplane.registry.models import Version


def replay(version: Version, *, actor: str) -> tuple[Job, bool]:
    """Rebuild a version from the nearest anchor and compare it with the record. Raises WrongState."""
    if version.state != Version.State.READY:
        raise WrongState(f"Version {version.number} is {version.state}; only a ready version can be replayed.")
    params = {"version": version.number}
    return jobs.enqueue(Job.Kind.REPLAY, version.run, params, f"replay:{version.run_id}:{version.number}", requested_by=actor)


def verify(island: Island, *, actor: str) -> tuple[Job, bool]:
    """Challenge an island to prove what it holds. Raises WrongState."""
    if island.verified_version_id is None:
        raise WrongState(f"{island.name} has not reported a version yet; verify it once it has synced.")
    return jobs.enqueue(Job.Kind.VERIFY, island.run, {"island": str(island.pk)}, f"verify:{island.pk}", requested_by=actor)
