"""Walks a route over the run's own blobs: an anchor, then patch by patch, into an image folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from controlplane.registry import selectors
from controlplane.registry.models import Run, Version
from controlplane.registry.routes import Plan
from mailboat.errors import StoreError
from mailboat.image import Image, Overlay
from workers.materials import checked_files, open_anchor, recorded_state
from workers.work import Work

Arrived = Callable[[Version, Image], None]
Passing = Callable[[Image, Overlay], None]


def walk(
    work: Work,
    run: Run,
    route: Plan,
    *,
    folder: Path,
    image: Image | None = None,
    arrived: Arrived | None = None,
    passing: Passing | None = None,
) -> Image:
    """Takes the image in `folder` (None: there is none yet) along the route; `arrived` sees it at each version,
    `passing` before each patch is written.
    """
    try:
        for number, step in enumerate(route.steps):
            work.progress(number, len(route.steps), "steps")
            version = selectors.version(run, step["version"] if step["kind"] == "anchor" else step["to"])
            if step["kind"] == "anchor":
                if image is not None:
                    image.close()
                image = _begin(work, version, step["files"], folder)
            elif image is None:
                raise StoreError(f"The route to version {route.target} has no beginning; publish an anchor.")
            else:
                _advance(work, version, step["parts"], image, passing)
            if arrived is not None:
                arrived(version, image)
        if image is None:
            raise StoreError(f"The route to version {route.target} is empty; publish an anchor.")
    except BaseException:
        if image is not None:
            image.close()
        raise
    work.progress(len(route.steps), len(route.steps), "steps")
    return image


def _begin(work: Work, version: Version, files: list[dict[str, Any]], folder: Path) -> Image:
    run = version.run
    state = recorded_state(version)
    checked_files(run, files, work.scratch, lambda _: work.check())
    with open_anchor(run, files, work.scratch, state.inventory.aliases) as anchor:
        anchor.inventory.require_same(state.inventory)
        return Image.create(folder, anchor, state)


def _advance(work: Work, version: Version, parts: list[dict[str, Any]], image: Image, passing: Passing | None) -> None:
    paths = checked_files(version.run, parts, work.scratch, lambda _: work.check())
    overlay = image.prepare(paths, recorded_state(version), scratch=work.scratch)
    try:
        work.check()
        if passing is not None:
            passing(image, overlay)
        image.commit(overlay)
    finally:
        overlay.close()
