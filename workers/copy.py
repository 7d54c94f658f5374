"""The worker's copy of a run: an image at the last version proven here, the base of the next patch.

It lies in `MAILBOAT_HOME/copies/<run>` and is derived data: when it is missing, dirty or elsewhere it is rebuilt from
the anchor and the patches. One process at a time uses it.
"""

from __future__ import annotations

import fcntl
import os
import select
from pathlib import Path
from types import TracebackType
from typing import Self

from django.conf import settings

from controlplane.registry import routes
from controlplane.registry.cost import Means
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Run, Version
from mailboat.checkpoint.source import TensorSource
from mailboat.digest import State
from mailboat.durable import remove
from mailboat.errors import MailboatError, StoreError
from mailboat.image import Image, Overlay
from workers.rebuild import Passing, walk
from workers.work import Work

_LOOK_SECONDS = 0.1
LOCAL = Means.of(link=1e9)  # beside the blobs, nearly every byte is free


class Copy:
    """The copy of `run`, held by this process inside a `with` block; it waits its turn and obeys a cancel meanwhile."""

    def __init__(self, work: Work, run: Run, *, place: str = "") -> None:
        self._work = work
        self._run = run
        self.folder = Path(settings.MAILBOAT_HOME) / "copies" / str(run.pk) / place
        self._lock = -1
        self._image: Image | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not self._taken():
                self._work.check()
                select.select([], [], [], _LOOK_SECONDS)
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._image is not None:
            self._image.close()
        os.close(self._lock)

    def at(self, version: Version) -> Image | None:
        """The image when it holds this version's state already."""
        image = self.opened()
        return image if image is not None and image.digest == version.state_digest else None

    def bring_to(self, version: Version) -> Image:
        """The image at a ready version: as it is, along patches, or rebuilt from an anchor."""
        image = self.at(version)
        if image is not None:
            return image
        held = self._image.digest if self._image is not None else ""
        try:
            route = routes.find(self._run, held, version.number, means=LOCAL, scope=routes.PUBLISHED)
        except Refusal as refusal:
            if not held or refusal.code not in {"unknown_base", "no_route"}:
                raise
            route = routes.find(self._run, "", version.number, means=LOCAL, scope=routes.PUBLISHED)
        if len(route.steps) > 1 or route.start is None:
            self._work.log(f"Bringing the worker's copy to version {version.number} in {len(route.steps)} steps.")
        kept, self._image = self._image, None  # walk closes it when it fails half way
        try:
            self._image = walk(self._work, self._run, route, folder=self.folder / "image", image=kept)
        except MailboatError as error:
            if route.start is None:
                raise
            self._work.log(f"The worker's copy could not follow ({error}); it is rebuilt from an anchor.", "warning")
            self._image = self.rebuild(version)
        return self._image

    def advance(self, route: routes.Plan, passing: Passing) -> None:
        """Takes the image that is there along patches; `passing` sees each before it is written."""
        kept, self._image = self._image, None
        self._image = walk(self._work, self._run, route, folder=self.folder / "image", image=kept, passing=passing)

    def rebuild(self, version: Version) -> Image:
        """The image at a ready version from an anchor, whatever there was before."""
        if self._image is not None:
            self._image.close()
            self._image = None
        route = routes.find(self._run, "", version.number, means=LOCAL, scope=routes.PUBLISHED)
        self._image = walk(self._work, self._run, route, folder=self.folder / "image")
        return self._image

    def discard(self) -> None:
        """Gives the image up: the next one is made from an anchor."""
        if self._image is not None:
            self._image.close()
            self._image = None
        remove(self.folder / "image")

    def keep(self, image: Image, overlay: Overlay) -> None:
        """Takes a proven patch into the copy. Failing costs nothing but a rebuild later."""
        try:
            image.commit(overlay)
        except (MailboatError, OSError) as error:
            self._work.log(f"The worker's copy was not moved on and will be rebuilt: {error}", "warning")

    def begin(self, source: TensorSource, state: State) -> None:
        """Makes a proven anchor the copy. Failing costs nothing but a rebuild later."""
        if self._image is not None:
            self._image.close()
            self._image = None
        try:
            self._image = Image.create(self.folder / "image", source, state)
        except (MailboatError, OSError) as error:
            self._work.log(f"The worker's copy was not made and will be rebuilt: {error}", "warning")

    def opened(self) -> Image | None:
        """The image wherever it stands; None when there is none that opens."""
        if self._image is None:
            try:
                self._image = Image.open(self.folder / "image")
            except StoreError:
                return None
        return self._image

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
