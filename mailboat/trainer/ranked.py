"""The publisher of a training job of several processes: each rank builds and uploads the part that it owns, rank 0
commits.

It must never commit unless every rank's part is uploaded; a failure of one rank fails the publish on all of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mailboat.digest import State
from mailboat.durable import remove
from mailboat.errors import InventoryMismatch, StoreError
from mailboat.image import Image
from mailboat.manifest import BlobRef, ParentRef, PatchRef
from mailboat.patch.build import BuiltPatch, PartBuilder, PartSpec, part_builder
from mailboat.patch.encoder import EncodeFor
from mailboat.patience import PATIENCE
from mailboat.replies import ReadyVersion
from mailboat.trainer.copy import Candidate
from mailboat.trainer.holdings import Holdings, OwnedSource, StaleChanges
from mailboat.trainer.in_place import DEVICE_BYTES
from mailboat.trainer.publisher import PublishedVersion, Publisher, Standing
from mailboat.trainer.ranks import Gathered, Ranks, serve
from mailboat.trainer.seconds import Laps
from mailboat.trainer.tensors import NamedTensors
from mailboat.transfer import upload_file

_log = logging.getLogger(__name__)

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part, uploaded."""

    blob: BlobRef
    changed: int
    path: Path


class RankedPublisher(Publisher):
    """Publishes one run from all ranks of a torch.distributed job (DDP, FSDP2, and mixtures).

    Made, used and closed by every rank, with the same arguments; `group` is a process group (default: all ranks).
    The first rank of each machine keeps the copy of the last ready version for all of that machine (`state_dir`, on a
    local disk). `publish` is called by all ranks together; `publish_checkpoint` and `resume` by rank 0 alone.
    """

    def __init__(
        self,
        server: str,
        project: str,
        run: str,
        token: str,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        served_format: str = "",
        signing_key: str | os.PathLike[str] | None = None,
        device_bytes: int = DEVICE_BYTES,
        patience: float = PATIENCE,
        group: Any = None,
    ) -> None:
        self._ranks = Ranks(group)
        kept = state_dir if self._ranks.leads_host else None
        made = super().__init__
        self._ranks.together(
            lambda: made(
                server, project, run, token,
                state_dir=kept, ca_file=ca_file, served_format=served_format, signing_key=signing_key,
                device_bytes=device_bytes, patience=patience,
            )
        )  # fmt: skip

    def close(self) -> None:
        """Lets go of the copy, of connections and of the group."""
        super().close()
        self._ranks.close()

    def publish(
        self,
        named_tensors: NamedTensors,
        step: int | None = None,
        side_files: Mapping[str, bytes] | None = None,
        wait: bool = True,
    ) -> PublishedVersion:
        """Publishes what the ranks hold: tensors that some or all of them have whole, and distributed ones (DTensor).

        A tensor on several ranks is published once, by one of them, after their bytes were proven equal; a difference
        raises CheckpointError with its name, on every rank. A split tensor is gathered to its owner. Memory of a rank:
        what it owns of split tensors on the CPU (about the model / ranks), and one whole tensor at a time; of what lies
        on accelerators the changes alone.
        `step`, `side_files` and `wait` are rank 0's. Raises PeerFailed where another rank could not do its share.
        Otherwise as `Publisher.publish`.
        """
        with self._lock, ExitStack() as stack:
            standing, side, step, wait = self._ranks.from_first(lambda: self._begin(step, side_files, wait))
            image = self._host_image(standing, stack)
            self._laps = Laps()
            holdings = Holdings.of(self._ranks, named_tensors, side)
            self._laps.lap("gather")
            if image is not None and standing.parent is not None:
                try:
                    image.inventory.require_same(holdings.inventory)
                    return self._patch(holdings, step, standing, standing.parent, image, wait=wait)
                except InventoryMismatch:
                    if not standing.begins:
                        raise
            return self._anchor(holdings, step, replace(standing, parent=None), wait=wait)

    # -- what rank 0 and the first rank of each machine know

    def _begin(
        self, step: int | None, side: Mapping[str, bytes] | None, wait: bool
    ) -> tuple[Standing, dict[str, bytes], int | None, bool]:
        standing = self._in_epoch(step, self._standing())
        if side is None:
            image = standing.image
            side = {file.path: image.read_side(file.path) for file in image.side_files} if image else {}
        return replace(standing, image=None), dict(side), step, wait

    def _host_image(self, standing: Standing, stack: ExitStack) -> Image | None:
        """The parent's bytes: this machine's copy, which its first rank moves and the others read."""
        parent = standing.parent
        if parent is None:
            return None

        def bring() -> Path | None:
            if not self._ranks.leads_host:
                return None
            ready = ReadyVersion(parent.number, parent.state)
            return self._copy.bring_to(ready, self._api, self._run, standing.info.id).folder

        folder = self._ranks.together(bring)[self._ranks.host]

        def look() -> Image:
            if self._ranks.leads_host and self._copy.image is not None:
                return self._copy.image
            assert folder is not None  # noqa: S101
            image = stack.enter_context(Image.open(folder))
            if image.digest != parent.state:
                raise StoreError(f"The copy in {folder} is not that of version {parent.number}; publish again.")
            return image

        return self._each(look)

    def _each(self, work: Callable[[], Made]) -> Made:
        """Does `work` on every rank and keeps its result here; raises on all where one fails."""
        made: list[Made] = []
        self._ranks.together(lambda: made.append(work()))
        return made[0]

    # -- one version

    def _patch(
        self, holdings: Holdings, step: int | None, standing: Standing, parent: ParentRef, image: Image, *, wait: bool
    ) -> PublishedVersion:
        folder = image.folder.parent
        path = folder / f"version-{standing.number}-rank-{self._ranks.rank}.mbp"
        try:
            target, built = self._build(holdings, image, path, standing.info.encode_next)
            again = self._ranks.from_first(lambda: self._sent_before(target, step, standing))
            self._laps.lap("build")
            if again is None:
                parts = [part for part in self._ranks.together(lambda: self._upload(built)) if part is not None]
                self._laps.lap("upload")
                patch = PatchRef(tuple(part.blob for part in parts), sum(part.changed for part in parts))
                version = self._commit_once(lambda: self._commit_parts(target, standing, patch, step))
                self._keep(Candidate(parent.state, target, tuple(part.path for part in parts)))
            else:
                remove(path)
                version = self._mine(again)
        except BaseException:
            remove(path)
            raise
        return self._wait(version) if wait else version

    def _build(
        self, holdings: Holdings, image: Image, path: Path, encode_for: EncodeFor, *, again: bool = False
    ) -> tuple[State, BuiltPatch | None]:
        """The target's state, of everybody's rows, and this rank's part, where it owns anything."""
        with ExitStack() as stack:
            own = self._each(lambda: holdings.changes(image, self._old))
            self._laps.lap("gather")

            def scan() -> tuple[PartBuilder | None, State | None, str | None]:
                if not own.indices:
                    return None, None, None
                owners = sorted(set(holdings.owners))
                spec = PartSpec(owners.index(self._ranks.rank), len(owners), own.indices)
                opened = part_builder(image, own, path, spec, base_state=image.state, encode_for=encode_for)
                builder = stack.enter_context(opened)
                mine = builder.scan()
                try:
                    own.prove(mine)
                except StaleChanges as problem:
                    return builder, mine, str(problem)
                return builder, mine, None

            builder, mine, doubt = self._each(scan)
            doubts = [said for said in self._ranks.tell(doubt) if said is not None]
            if not doubts:
                target = self._joined(own, mine)
                built = self._each(lambda: None if builder is None else builder.write(target))
                holdings.built(self._old, image.digest, target.digest)
                return target, built
        if again:
            raise StaleChanges(doubts[0])
        _log.warning("Everything is compared with the copy again: %s", doubts[0])
        holdings.distrust(self._old)
        return self._build(holdings, image, path, encode_for, again=True)

    def _joined(self, own: OwnedSource, mine: State | None) -> State:
        """The state whose rows are those that each rank measured of what it owns."""
        rows = None if mine is None else (own.indices, mine.sums[[*own.indices]], mine.strong[[*own.indices]])
        target = own.nothing()
        for found in self._ranks.tell(rows):
            if found is not None:
                indices, sums, strong = found
                target.sums[[*indices]], target.strong[[*indices]] = sums, strong
        return target

    def _upload(self, built: BuiltPatch | None) -> _Part | None:
        if built is None:
            return None
        blob = BlobRef(sha256=built.sha256, size=built.size)
        upload_file(self._api, self._run, blob, built.path)
        return _Part(blob, built.changed, built.path)

    def _commit_parts(self, target: State, standing: Standing, patch: PatchRef, step: int | None) -> PublishedVersion:
        manifest = self._manifest(target, standing, patch, step)
        return self._send(manifest, None, sum(part.size for part in patch.parts), patch.changed)

    def _keep(self, candidate: Candidate) -> None:
        """Where all ranks are on one machine its copy follows by the parts at hand; else copies take islands' route."""
        if len(set(self._ranks.hosts)) > 1:
            for path in candidate.parts:
                remove(path)
        elif self._ranks.leads_host:
            self._copy.keep(candidate)

    def _anchor(self, holdings: Holdings, step: int | None, standing: Standing, *, wait: bool) -> PublishedVersion:
        own = self._each(holdings.whole)
        self._laps.lap("gather")
        state = self._joined(own, self._each(own.measure))
        self._each(lambda: self._copy_all(own, holdings.owners, state))
        holdings.built(self._old, None, state.digest)
        image = self._copy.image
        version = self._commit_once(lambda: self._commit_image(_present(image), step, standing))
        return self._wait(version) if wait else version

    def _copy_all(self, own: OwnedSource, owners: list[int], state: State) -> None:
        """Rank 0's copy, made anew; the other ranks give it the pieces that it reads."""
        if self._ranks.rank:
            serve(self._ranks, own)
            return
        source = Gathered(self._ranks, own, owners)
        try:
            self._copy.replace(source, state)
        finally:
            source.end()

    # -- one answer for all

    def _commit_once(self, commit: Callable[[], PublishedVersion]) -> PublishedVersion:
        """Rank 0 commits; every rank gets the version."""
        return self._mine(self._ranks.from_first(lambda: _plain(commit())))

    def _sent_before(self, target: State, step: int | None, standing: Standing) -> dict[str, Any] | None:
        again = self._answered(target.digest, step, standing.newest)
        return None if again is None else _plain(again)

    def _mine(self, version: dict[str, Any]) -> PublishedVersion:
        return PublishedVersion(**version, _api=self._api, _run=self._run)

    def _wait(self, version: PublishedVersion) -> PublishedVersion:
        self._ranks.from_first(lambda: version.wait_ready() and None)
        self._each(lambda: self._copy.settle(version.digest))
        return version


def _plain(version: PublishedVersion) -> dict[str, Any]:
    names = ("number", "digest", "patch_bytes", "changed", "elements", "full_bytes", "seconds")
    return {name: getattr(version, name) for name in names}


def _present(image: Image | None) -> Image:
    if image is None:
        raise StoreError("The copy was not made; publish again.")
    return image
