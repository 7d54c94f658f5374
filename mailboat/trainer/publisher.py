"""The publisher: turns a checkpoint or the tensors of a training process into the next version of a run.

Every patch is made against the bytes of the last *ready* version, never against what was sent or hoped for last.
Nothing is visible before the one commit call, and repeating that is harmless. It must never retry a publish under
another number by itself.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource, TensorSource
from mailboat.client import Api
from mailboat.digest import State, measure
from mailboat.durable import disk_full_as_error, remove
from mailboat.errors import InventoryMismatch, MailboatError, Unreachable
from mailboat.image import Image
from mailboat.manifest import MANIFEST_TYPE, BlobRef, Envelope, Manifest, ParentRef, PatchRef
from mailboat.patch.build import BuiltPatch, build_patch
from mailboat.patch.encoder import EncodeFor
from mailboat.patience import PATIENCE
from mailboat.replies import AnchorFile, ReadyVersion, RunInfo, VersionInfo
from mailboat.signing import read_key, sign
from mailboat.sizes import size
from mailboat.trainer.copy import Candidate, LocalCopy
from mailboat.trainer.holdings import Holdings, StaleChanges
from mailboat.trainer.in_place import DEVICE_BYTES, OldBytes, on_accelerator
from mailboat.trainer.ranks import Alone
from mailboat.trainer.seconds import Laps, Seconds
from mailboat.trainer.served import ServedWeights
from mailboat.trainer.tensors import NamedTensors, require_whole, tensor_source
from mailboat.transfer import file_blob, upload_bytes, upload_file

_log = logging.getLogger(__name__)

PENDING = frozenset({"committed", "building", "validating"})
READY, FAILED = "ready", "failed"
LOOK_BACK = 100  # versions among which the one before a step is looked for
FIRST_POLL, LONGEST_POLL = 0.05, 2.0  # seconds between looks at a version that is not ready yet


class PublishFailed(MailboatError):  # noqa: N818 - as the library's other errors, named for what happened
    """A committed version was refused by validation. It keeps its number; the next publish starts from the last ready
    one.
    """

    code = "publish_failed"


@dataclass(frozen=True)
class PublishedVersion:
    """A committed version. ``patch_bytes`` and ``changed`` are None for a version that stands alone; ``seconds`` for
    one that was committed before, its answer lost.
    """

    number: int
    digest: str
    patch_bytes: int | None
    changed: int | None
    elements: int
    full_bytes: int
    _api: Api = field(repr=False, compare=False)
    _run: str = field(repr=False, compare=False)
    seconds: Seconds | None = field(default=None, compare=False)

    def wait_ready(self, timeout: float | None = None) -> PublishedVersion:
        """Waits until the version is ready. Raises PublishFailed when it is refused, Unreachable after ``timeout``
        seconds.
        """
        version = _await_end(self._api, self._run, self.number, timeout)
        if version.state == FAILED:
            raise PublishFailed(f"Version {self.number} was refused: {version.reason or 'no reason was given'}")
        return self


@dataclass(frozen=True)
class _Attempt:
    """A commit whose answer was lost: if the server has it after all, publishing the same again gives that version."""

    manifest: str
    step: int | None
    version: PublishedVersion


@dataclass(frozen=True)
class Standing:
    """Where a run stands: its newest version in whatever state, the ready one that the next starts from (`parent`), the
    copy of that. The first version of an epoch (`begins`) may also stand alone.
    """

    info: RunInfo
    newest: VersionInfo | None
    parent: ParentRef | None
    image: Image | None
    begins: bool = False
    step: int | None = None  # of the parent

    @property
    def number(self) -> int:
        """The next version's number."""
        return 0 if self.newest is None else self.newest.number + 1


class Publisher:
    """Publishes the versions of one run; one publish at a time.

    ``token`` has the role publisher. ``state_dir`` keeps the copy of the last ready version between processes; without
    one it lies in a temporary folder (in shared memory when there is room) and a new process fetches it again. The run
    is made when it does not exist. ``signing_key`` is a private key's file (`mailboat keys new`; without one, the file
    that MAILBOAT_SIGNING_KEY names): every manifest is signed with it. ``device_bytes``: how much of the last ready
    version may stay on each rank's accelerator, where tensors that lie there are compared with it. ``patience``: for so
    many seconds a call bears that the control plane is away or busy (no connection, 502, 503, 504, 429), which is
    logged when it begins; then it raises Unreachable or ApiError. Use as a context manager or call `close`.
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
    ) -> None:
        key_file = signing_key or os.environ.get("MAILBOAT_SIGNING_KEY")
        self._signing_key = None if not key_file else read_key(Path(key_file))
        self._api = Api(server, project, token, ca_file=ca_file, patience=patience)
        self._run = run
        self._served_format = served_format
        self._known = self._new = False
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        self._laps = Laps()
        self._old = OldBytes(device_bytes)
        self._copy = LocalCopy(None if state_dir is None else Path(state_dir))

    def __enter__(self) -> Publisher:
        """Returns the publisher itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def close(self) -> None:
        """Lets go of the copy and of connections."""
        self._old.forget()
        self._copy.close()
        self._api.close()

    def publish_checkpoint(
        self, path: str | os.PathLike[str], step: int | None = None, wait: bool = True
    ) -> PublishedVersion:
        """Publishes a `.safetensors` file or checkpoint folder, which must rest meanwhile.

        With ``wait`` returns when the version is ready. Raises CheckpointError, CheckpointChanged, InventoryMismatch
        (with the names), Conflict (another publisher was faster; nothing was changed), PublishFailed, Unreachable,
        DiskFull.
        """
        with Checkpoint.open(Path(path)) as checkpoint:
            return self._publish(checkpoint, step, wait=wait)

    def publish(
        self,
        named_tensors: NamedTensors,
        step: int | None = None,
        side_files: Mapping[str, bytes] | None = None,
        wait: bool = True,
    ) -> PublishedVersion:
        """Publishes torch tensors (any device, contiguous or not) or NumPy arrays by name, bit for bit; `ServedWeights`
        as they are after one more look at their masters.

        They must rest until this returns; on an accelerator what writes them must be done, or ahead of this on the
        current stream. What lies there is compared there. ``side_files`` maps POSIX paths to bytes (config.json,
        tokenizer ...); None keeps those of the last ready version. Otherwise as `publish_checkpoint`.
        """
        with self._lock:
            standing = self._standing()
            if side_files is None:
                image = standing.image
                side_files = {file.path: image.read_side(file.path) for file in image.side_files} if image else {}
            self._laps = Laps()
            source = self._look(named_tensors, side_files)
            self._laps.lap("gather")
            return self._commit(source, step, standing, wait=wait)

    def resume(
        self,
        *,
        version: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        reason: str = "The trainer was resumed.",
    ) -> int:
        """Says that training goes on from an older state: a version by its number, or the served weights in
        ``checkpoint``, which the server looks for among its versions and which need not be there. Returns the number of
        the new epoch.

        Numbers of versions go on; what was published after that state is given up, and islands on it are led over by
        the next version. Raises Conflict ``parent_not_ready``, CheckpointError. Where steps are published, one that
        goes back does the same by itself; a step that is repeated, with other weights, goes on in its epoch.
        """
        state = ""
        if checkpoint is not None:
            with Checkpoint.open(Path(checkpoint)) as opened:
                state = measure(opened).digest
        with self._lock:
            return self._api.open_epoch(self._run, version, reason, from_state=state)

    def _look(self, named_tensors: NamedTensors, side_files: Mapping[str, bytes]) -> ArraySource | Holdings:
        """The tensors as bytes of this host, or, where an accelerator has any, as what one rank holds."""
        given = named_tensors if isinstance(named_tensors, Mapping) else list(named_tensors)
        pairs = given.items() if isinstance(given, Mapping) else given
        if any(on_accelerator(value) for _, value in pairs):
            for name, value in pairs:
                require_whole(name, value)
            return Holdings.of(Alone(), given, side_files)
        if isinstance(given, ServedWeights):
            given.recheck()
        return tensor_source(given, side_files)

    def _publish(self, source: TensorSource, step: int | None, *, wait: bool) -> PublishedVersion:
        with self._lock:
            standing = self._standing()
            self._laps = Laps()
            return self._commit(source, step, standing, wait=wait)

    def _standing(self) -> Standing:
        """Where the run stands, with the copy brought to its last ready version. Waits for a pending version to end."""
        if not self._known:
            self._new = self._api.create_run(self._run, served_format=self._served_format)
            self._known = True
        newest = self._api.newest_version(self._run)
        if newest is not None and newest.state in PENDING:
            newest = _await_end(self._api, self._run, newest.number, None)
        info = self._api.run(self._run)
        if info.latest_ready is None:
            return Standing(info, newest, None, None)
        base = self._base(info, info.latest_ready.number, newest)
        if base.state != READY:  # what the epoch goes on from is not kept any more
            return Standing(info, newest, None, None, begins=True)
        ready = ReadyVersion(base.number, base.state_digest or "")
        image = self._copy.bring_to(ready, self._api, self._run, info.id)
        parent = ParentRef(ready.number, ready.state_digest)
        return Standing(info, newest, parent, image, base.epoch != info.epoch, base.step)

    def _base(self, info: RunInfo, latest: int, newest: VersionInfo | None) -> VersionInfo:
        """The version that the next patch starts from: the last ready one, or where a new epoch goes on from."""
        ready = newest if newest is not None and newest.number == latest else self._api.version(self._run, latest)
        if ready.epoch == info.epoch or info.epoch_from in {None, latest}:
            return ready
        return self._api.version(self._run, info.epoch_from)

    # -- one version

    def _commit(
        self, source: TensorSource | Holdings, step: int | None, standing: Standing, *, wait: bool
    ) -> PublishedVersion:
        standing = self._in_epoch(step, standing)
        self._laps.skip()
        version = self._commit_version(source, step, standing)
        if wait:
            version.wait_ready()
            self._copy.settle(version.digest)
        return version

    def _commit_version(
        self, source: TensorSource | Holdings, step: int | None, standing: Standing
    ) -> PublishedVersion:
        if standing.parent is None or standing.image is None:
            return self._commit_anchor(source, step, standing)
        try:
            return self._commit_patch(source, step, standing, standing.parent, standing.image)
        except InventoryMismatch:
            if not standing.begins:
                raise
            return self._commit_anchor(source, step, replace(standing, parent=None))

    def _in_epoch(self, step: int | None, standing: Standing) -> Standing:
        """The same, or where a new epoch stands when the step went back."""
        if step is None or standing.begins or standing.step is None or step >= standing.step:
            return standing
        self._open_epoch(step, standing.step)
        return self._standing()

    def _open_epoch(self, step: int, last: int) -> None:
        """The trainer's step went back: it was resumed from an older state, whatever it said."""
        recent = self._api.newest_versions(self._run, limit=LOOK_BACK)
        before = (v.number for v in recent if v.state == READY and v.step is not None and v.step < step)
        reason = f"The trainer's step went back from {last} to {step}."
        self._api.open_epoch(self._run, next(before, None), reason)

    def _commit_patch(
        self, source: TensorSource | Holdings, step: int | None, standing: Standing, parent: ParentRef, image: Image
    ) -> PublishedVersion:
        path = self._copy.folder(image.inventory.full_bytes) / f"version-{standing.number}.mbp"
        try:
            with disk_full_as_error(path.parent):
                built = self._build_patch(image, source, path, standing.info.encode_next)
            _check_unchanged(source)
            if (again := self._answered(built.target_state.digest, step, standing.newest)) is not None:
                remove(path)
                return again
            self._laps.lap("build")
            part = BlobRef(sha256=built.sha256, size=built.size)
            upload_file(self._api, self._run, part, path)
            self._laps.lap("upload")
            manifest = self._manifest(built.target_state, standing, PatchRef((part,), built.changed), step)
            version = self._send(manifest, None, built.size, built.changed)
        except BaseException:
            remove(path)
            raise
        self._copy.keep(Candidate(parent.state, built.target_state, (path,)))
        return version

    def _build_patch(
        self, image: Image, source: TensorSource | Holdings, path: Path, encode_for: EncodeFor
    ) -> BuiltPatch:
        if not isinstance(source, Holdings):
            return build_patch(image, source, path, base_state=image.state, encode_for=encode_for)
        image.inventory.require_same(source.inventory)
        try:
            return self._build_found(image, source, path, encode_for)
        except StaleChanges as problem:
            _log.warning("Everything is compared with the copy again: %s", problem)
            source.distrust(self._old)
            return self._build_found(image, source, path, encode_for)

    def _build_found(self, image: Image, holdings: Holdings, path: Path, encode_for: EncodeFor) -> BuiltPatch:
        own = holdings.changes(image, self._old)
        built = build_patch(
            image, own, path, base_state=image.state, encode_for=encode_for, approve=lambda _, target: own.prove(target)
        )
        holdings.built(self._old, image.digest, built.target_state.digest)
        return built

    def _commit_anchor(self, source: TensorSource | Holdings, step: int | None, standing: Standing) -> PublishedVersion:
        target = source.whole() if isinstance(source, Holdings) else source
        state = measure(target)
        image = self._copy.replace(target, state)
        if isinstance(source, Holdings):
            source.built(self._old, None, state.digest)
        _check_unchanged(target)
        return self._commit_image(image, step, standing)

    def _commit_image(self, image: Image, step: int | None, standing: Standing) -> PublishedVersion:
        """The copy, made anew, as a version that stands alone."""
        self._laps.lap("build")
        if self._new and standing.newest is None:  # or its name is misspelt
            whole = size(image.inventory.full_bytes)
            _log.warning("run %s is new: it begins with a whole anchor (%s)", self._run, whole)
        # What is uploaded is the copy that was just compared with the digests: the source may change from here on.
        files = anchor_files(image)
        for file, path in files:
            upload_file(self._api, self._run, file.blob, path)
        self._laps.lap("upload")
        manifest = self._manifest(image.state, standing, None, step)
        return self._send(manifest, [file for file, _ in files], None, None)

    def _manifest(self, state: State, standing: Standing, patch: PatchRef | None, step: int | None) -> Manifest:
        inventory = state.inventory
        return Manifest(
            run=standing.info.id,
            epoch=standing.info.epoch,
            number=standing.number,
            parent=standing.parent,
            inventory=upload_bytes(self._api, self._run, inventory.to_bytes()),
            digests=upload_bytes(self._api, self._run, state.digests_bytes()),
            side_files=state.side_files,
            state=state.digest,
            patch=patch,
            elements=inventory.elements,
            full_bytes=inventory.full_bytes,
            step=step,
        )

    def _send(
        self, manifest: Manifest, anchor: list[AnchorFile] | None, patch_bytes: int | None, changed: int | None
    ) -> PublishedVersion:
        version = PublishedVersion(
            manifest.number, manifest.state, patch_bytes, changed, manifest.elements, manifest.full_bytes,
            self._api, self._run,
        )  # fmt: skip
        self._attempt = _Attempt(manifest.sha256, manifest.step, version)
        envelope = Envelope.wrap(MANIFEST_TYPE, manifest.to_bytes())
        if self._signing_key is not None:
            envelope = sign(envelope, self._signing_key)
        try:
            self._api.commit_version(self._run, envelope, anchor)
        except Unreachable:
            raise  # the attempt is remembered: the server may have it
        except MailboatError:
            self._attempt = None
            raise
        self._attempt = None
        self._laps.lap("commit")
        return replace(version, seconds=self._laps.of_version(version.number))

    def _answered(self, digest: str, step: int | None, newest: VersionInfo | None) -> PublishedVersion | None:
        """The version that an earlier publish of the very same made, whose answer was lost."""
        attempt, self._attempt = self._attempt, None
        if attempt is None or newest is None or newest.state == FAILED:
            return None
        same = newest.manifest == attempt.manifest and attempt.version.digest == digest and attempt.step == step
        return attempt.version if same else None


def anchor_files(image: Image) -> list[tuple[AnchorFile, Path]]:
    """The files of an image as an anchor: shards, index and side files."""
    with Checkpoint.open(image.folder, aliases=dict(image.inventory.aliases)) as checkpoint:
        names = [shard.name for shard in checkpoint.shards]
        if checkpoint.layout.index is not None:
            names.append(checkpoint.layout.index[0])
        names += [file.path for file in checkpoint.side_files]
    return [(AnchorFile(name, file_blob(image.folder / name)), image.folder / name) for name in names]


def _check_unchanged(source: TensorSource | Holdings) -> None:
    if isinstance(source, Checkpoint):
        source.check_unchanged()


def _await_end(api: Api, run: str, number: int, timeout: float | None) -> VersionInfo:
    """Waits until a version is no longer pending."""
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = FIRST_POLL
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        version = api.version(run, number, patience=left)
        if version.state not in PENDING:
            return version
        if deadline is not None and time.monotonic() >= deadline:
            raise Unreachable(f"Version {number} is not ready after {timeout:.0f} s; look at its job.")
        api.sleep(pause)
        pause = min(LONGEST_POLL, pause * 1.3)


def publish_on_server(
    server: str,
    project: str,
    run: str,
    token: str,
    path: Path,
    *,
    step: int | None,
    wait: bool,
    ca_file: str | None = None,
) -> VersionInfo:
    """Asks the server's workers to build the next version from a checkpoint under one of their allowed roots.

    Raises PublishFailed, Conflict, ApiError ``checkpoint_not_allowed``.
    """
    api = Api(server, project, token, ca_file=ca_file, patience=PATIENCE)
    if api.create_run(run):
        _log.warning("run %s is new: it begins with a whole anchor", run)
    newest = api.newest_version(run)
    if newest is not None and newest.state in PENDING:
        newest = _await_end(api, run, newest.number, None)
    info = api.run(run)
    parent = info.latest_ready.number if info.latest_ready else None
    if newest is not None and newest.epoch != info.epoch:
        parent = info.epoch_from if info.epoch_from is not None else parent
    number = 0 if newest is None else newest.number + 1
    version = api.commit_checkpoint(
        run, str(path.absolute()), number=number, parent=parent, epoch=info.epoch, step=step
    )
    if wait:
        version = _await_end(api, run, number, None)
        if version.state == FAILED:
            raise PublishFailed(f"Version {number} was refused: {version.reason or 'no reason was given'}")
    return version
