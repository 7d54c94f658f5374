"""The last states of a run as sources of bytes, for work that needs two of them at once: merging, going back, anchors.

An image of its own follows the run, so that no publication waits for it, and what each patch overwrote is kept in
memory (or in files without names): any of the last states is the image with that laid over it. All of it is derived;
a process that begins anew goes back to an anchor once.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from controlplane.registry import routes
from controlplane.registry.models import Run, Version
from mailboat.checkpoint.source import TensorSource
from mailboat.errors import DigestMismatch
from mailboat.image import Image
from mailboat.overlay import Overlay
from workers.copy import LOCAL, Copy
from workers.rebuild import walk
from workers.work import Work

T = TypeVar("T")
MOST_BYTES = 512 << 20  # of what is kept for going back, beyond that no more than the model has
_kept: dict[uuid.UUID, list[Overlay]] = {}  # by run, of this process: undoing one patch each, the oldest first


class History:
    """The states of `run`, held by this process inside a `with` block."""

    def __init__(self, work: Work, run: Run) -> None:
        self._work, self._run = work, run
        self._copy = Copy(work, run, place="history")
        self._undo = _kept.setdefault(run.pk, [])

    def __enter__(self) -> History:
        self._copy.__enter__()
        image = self._copy.opened()
        if self._undo and (image is None or image.digest != self._undo[-1].base_digest):
            self._forget(len(self._undo))  # another process has moved it
        for run in [run for run in _kept if run != self._run.pk]:  # one run at a time is worth the memory
            for overlay in _kept.pop(run):
                overlay.close()
        return self

    def __exit__(self, *failure: object) -> None:
        self._copy.__exit__(None, None, None)

    @contextmanager
    def pair(self, first: Version, second: Version) -> Iterator[tuple[TensorSource, TensorSource]]:
        """The bytes of two ready versions, whichever is older."""
        older, newer = sorted((first, second), key=lambda version: version.number)
        with ExitStack() as stack:
            if not self._covers(older):
                self._begin(older)
            if not self._covers(newer):
                self._follow(newer, keep=older)
            found = {version.pk: self._at(version, stack) for version in (older, newer)}
            yield found[first.pk], found[second.pk]

    def healing(self, make: Callable[[], T]) -> T:
        """What `make` makes of a pair; once more from an anchor when the copy turns out to be damaged."""
        try:
            return make()
        except DigestMismatch as error:
            self._work.log(f"The worker's copy is damaged and rebuilt: {error}", "warning")
            self._forget(len(self._undo))
            self._copy.discard()
            return make()

    def _covers(self, version: Version) -> bool:
        image = self._copy.opened()
        held = {overlay.target.digest for overlay in self._undo} | ({image.digest} if image else set())
        return version.state_digest in held

    def _begin(self, version: Version) -> None:
        """Brings the image to a version, from where it is or from an anchor."""
        image = self._copy.opened()
        if image is None or not self._follow(version):
            self._forget(len(self._undo))
            self._copy.rebuild(version)

    def _follow(self, version: Version, *, keep: Version | None = None) -> bool:
        """Goes on to a version by the publisher's patches and keeps what they overwrite; False when none lead there.
        `keep`: a state that must not be forgotten on the way.
        """
        image = self._copy.opened()
        if image is None or not routes.numbers_of(self._run, image.digest):
            return False
        route = routes.find(self._run, image.digest, version.number, means=LOCAL, scope=routes.PUBLISHED)
        if route.start is None:
            return False

        def passing(image: Image, overlay: Overlay) -> None:
            self._undo.append(Overlay.undoing(overlay, image, image.state, self._copy.folder))
            self._shrink(image.inventory.full_bytes, keep)

        self._copy.advance(route, passing)
        return True

    def _at(self, version: Version, stack: ExitStack) -> TensorSource:
        image = self._copy.opened()
        if image is not None and image.digest == version.state_digest:
            return image
        for number in range(len(self._undo) - 1, -1, -1):
            if image is not None and self._undo[number].target.digest == version.state_digest:
                undo = Overlay.stacked(self._undo[number:][::-1], self._copy.folder)
                stack.callback(undo.close)
                return image.overlaid(undo)
        return stack.enter_context(self._elsewhere(version))

    @contextmanager
    def _elsewhere(self, version: Version) -> Iterator[TensorSource]:
        """A state on another stretch of the run: built for this once."""
        route = routes.find(self._run, "", version.number, means=LOCAL, scope=routes.PUBLISHED)
        image = walk(self._work, self._run, route, folder=self._work.scratch / f"image-{version.number}")
        try:
            yield image
        finally:
            image.close()

    def _shrink(self, full_bytes: int, keep: Version | None) -> None:
        limit = max(MOST_BYTES, full_bytes)
        while len(self._undo) > 1 and sum(overlay.nbytes for overlay in self._undo) > limit:
            if keep is not None and self._undo[0].target.digest == keep.state_digest:
                return
            self._forget(1)

    def _forget(self, count: int) -> None:
        for overlay in self._undo[:count]:
            overlay.close()
        del self._undo[:count]
