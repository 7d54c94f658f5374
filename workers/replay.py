"""Replay: rebuilds a version from the nearest anchor, patch by patch, and compares every digest with the record; that
of a derived run is also quantised again from its source.
"""

from __future__ import annotations

import time
from typing import Any

from controlplane.registry import routes, selectors
from controlplane.registry.models import Version
from mailboat.digest import measure
from mailboat.errors import DigestMismatch, ManifestError
from mailboat.image import Image
from workers.derive import quantised
from workers.history import History
from workers.materials import first_difference, recorded_state, require_same
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
    result = _result(target, versions, started)
    if run.source is not None:
        result["requantised"] = _requantise(work, selectors.version(run, target), result)
    return result


def _requantise(work: Work, version: Version, result: dict[str, Any]) -> bool:
    """Makes a version of a derived run again from the signed version of its source, and compares every digest."""
    source = version.source
    if source is None:
        raise ManifestError(f"Version {version.number} does not name what it was derived from.")
    with History(work, source.run) as history, history.pair(source, source) as (proven, _):
        require_same(recorded_state(source), measure(proven, progress=lambda _: work.check()), "The source's copy")
        found = measure(quantised(version.run, proven), progress=work.bytes_of(version.full_bytes or 0))
    difference = first_difference(recorded_state(version), found)
    if difference is None:
        work.log(f"Quantised again from version {source.number} of {source.run.name}: identical in every tensor.")
        return True
    sentence = f"Quantised again, version {version.number} differs from the record: {difference['what']}."
    raise Findings(sentence, {**result, "requantised": False, "difference": difference})


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
