"""Replay: rebuilds a version from the nearest anchor, patch by patch, and compares every digest with the record."""

from __future__ import annotations

import time
from typing import Any

from controlplane.registry import routes
from controlplane.registry.models import Version
from mailboat.errors import DigestMismatch, ManifestError
from mailboat.image import Image
from workers.materials import first_difference, recorded_state
from workers.rebuild import walk
from workers.work import Findings, Work, environment


def replay(work: Work) -> dict[str, Any]:
    """The job. Its result says per version whether it was identical; a difference fails the job with the evidence."""
    run = work.job.run
    if run is None:
        raise ManifestError("The job names no run; queue it again.")
    target = int(work.params["version"])
    route = routes.find(run, "", target, scope=routes.PUBLISHED)
    versions: list[dict[str, Any]] = []
    started = last = time.monotonic()

    def compare(version: Version, image: Image) -> None:
        nonlocal last
        difference = first_difference(recorded_state(version), image.measure())
        now = time.monotonic()
        versions.append({"number": version.number, "identical": difference is None, "seconds": round(now - last, 3)})
        last = now
        if difference is not None:
            raise _found(target, versions, version.number, difference, started)
        work.log(f"Version {version.number} is identical in every tensor.")

    try:
        walk(work, run, route, folder=work.scratch / "image", arrived=compare).close()
    except DigestMismatch as error:  # the sums told before anything was written
        step = route.steps[len(versions)]
        number = step["version"] if step["kind"] == "anchor" else step["to"]
        versions.append({"number": number, "identical": False, "seconds": round(time.monotonic() - last, 3)})
        raise _found(target, versions, number, {"what": str(error)}, started) from error
    return _result(target, versions, started)


def _result(target: int, versions: list[dict[str, Any]], started: float) -> dict[str, Any]:
    return {
        "version": target,
        "versions": versions,
        "identical": all(version["identical"] for version in versions),
        "seconds": round(time.monotonic() - started, 3),
        "environment": environment(),
    }


def _found(
    target: int, versions: list[dict[str, Any]], number: int, difference: dict[str, Any], started: float
) -> Findings:
    sentence = f"The replay of version {target} differs from the record at version {number}: {difference['what']}."
    return Findings(sentence, {**_result(target, versions, started), "difference": difference})
