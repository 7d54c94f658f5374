"""An anchor's files, put together from what lies on this host already, from a reference, and from the run's blobs.

What has the right SHA-256 is not fetched again: what earlier tries left, shards of older bases, the checkpoint given
with --base, the folder that a reference names. Files of others are linked to, never copied and never written; every
byte is proven once more by the strong digests of the whole before anything is held.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from mailboat.durable import disk_full_as_error, remove, require_space, sync_folder
from mailboat.errors import ApiError, DigestMismatch, DiskFull, MailboatError, Unreachable
from mailboat.island.link import EmulatedLink
from mailboat.island.store import Store
from mailboat.manifest import BlobRef
from mailboat.replies import AnchorFile, AnchorStep
from mailboat.route import Documents
from mailboat.transfer import download, file_blob

NAMED = 3  # files that a sentence names


class ReferenceFailed(MailboatError):  # noqa: N818 - as the library's other errors, named for what happened
    """An anchor by reference can't be had from where it lies; another route may be."""

    code = "reference_failed"


class Gathering:
    """Brings the files of an anchor into ``folder`` (of the store's `incoming`). ``local`` is the checkpoint given with
    --base; ``say`` is told where it does not have the right bytes. ``holds_nothing``: what the store keeps may go when
    there is no room.
    """

    def __init__(
        self,
        documents: Documents,
        store: Store,
        folder: Path,
        *,
        local: Path | None,
        link: EmulatedLink | None,
        holds_nothing: bool,
        say: Callable[[str], None],
    ) -> None:
        self._documents = documents
        self._store = store
        self._folder = folder
        self._local = local
        self._link = link
        self._holds_nothing = holds_nothing
        self._say = say
        self._known: dict[Path, BlobRef | None] = {}

    def fetch(self, step: AnchorStep) -> int:
        """Brings every file; returns the bytes that travelled. Raises DiskFull before anything is fetched."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._clear({self._folder / file.path for file in step.files})
        missing = [file for file in step.files if self._blob(self._folder / file.path) != file.blob]
        missing = [file for file in missing if not self._on_this_host(file)]
        place = _folder_of(step.uri)
        if place is not None:
            missing = [file for file in missing if not self._take(place / file.path, file)]
        if self._local is not None and missing:
            lacks = _what_lacks(self._local, missing)
            anchor = f"the anchor of version {step.version}"
            self._say(f"the base {self._local} does not hold the bytes of {anchor} ({lacks}); fetching it")
        self._require_room(step.version, missing)
        return sum(self._download(step, file) for file in missing)

    def _clear(self, wanted: set[Path]) -> None:
        """Removes what another try left and this anchor does not have: it would count as a side file."""
        parts = {path.with_name(path.name + ".part") for path in wanted}
        for path in _files(self._folder):
            if path not in wanted | parts:
                remove(path)

    # -- from this host

    def _on_this_host(self, file: AnchorFile) -> bool:
        return any(self._take(path, file) for path in self._candidates(file.blob.size))

    def _candidates(self, size: int) -> Iterator[Path]:
        folders = [*self._store.base_folder.iterdir(), *self._store.incoming.glob("base-*")]
        if self._local is not None:
            folders.append(self._local)
        for folder in folders:
            if folder != self._folder:
                yield from (path for path in _files(folder) if path.is_file() and path.stat().st_size == size)

    def _take(self, path: Path, file: AnchorFile) -> bool:
        """Makes ``path`` the file, when it has the right bytes: the store's own by a hard link, others' by a link."""
        target = self._folder / file.path
        if self._blob(path) != file.blob:
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        remove(target)
        own = self._store.root in path.parents and not path.is_symlink()
        try:
            if own:
                os.link(path, target)
            else:
                target.symlink_to(os.path.realpath(path))
        except OSError:
            with disk_full_as_error(self._folder):
                shutil.copyfile(path, target)
                with target.open("rb") as copied:
                    os.fsync(copied.fileno())
        sync_folder(target.parent)
        return True

    def _blob(self, path: Path) -> BlobRef | None:
        """Digest and size of a file, read once; None when it can't be read."""
        if path not in self._known:
            try:
                self._known[path] = file_blob(path)
            except OSError:
                self._known[path] = None
        return self._known[path]

    # -- from elsewhere

    def _require_room(self, version: int, missing: Iterable[AnchorFile]) -> None:
        needed = sum(max(0, file.blob.size - self._arrived(file)) for file in missing)
        what = f"The anchor of version {version}"
        try:
            require_space(self._folder, needed, what)
        except DiskFull:
            if not self._holds_nothing:
                raise
            self._store.make_room(self._folder)
            require_space(self._folder, needed, what)

    def _arrived(self, file: AnchorFile) -> int:
        part = self._folder / f"{file.path}.part"
        return part.stat().st_size if part.is_file() else 0

    def _download(self, step: AnchorStep, file: AnchorFile) -> int:
        api, target = self._documents.api, self._folder / file.path
        why: MailboatError | None = None
        if urlsplit(step.uri).scheme in {"http", "https"}:
            url = f"{step.uri.rstrip('/')}/{quote(file.path)}"
            try:
                return download(
                    api, self._documents.run, file.blob, target,
                    link=self._link, open_at=lambda start: api.open_elsewhere(url, start=start),
                )  # fmt: skip
            except (DigestMismatch, Unreachable, ApiError) as error:
                why = error
        try:
            return download(api, self._documents.run, file.blob, target, link=self._link)
        except (DigestMismatch, ApiError) as error:
            if not step.uri or (isinstance(error, ApiError) and error.status != 404):
                raise
            reason = why or f"{file.path} is not there with the right bytes"
            raise ReferenceFailed(
                f"The anchor of version {step.version} can't be had from {step.uri}: {reason}"
            ) from error


def _folder_of(uri: str) -> Path | None:
    """The folder that a file: reference names on this host."""
    address = urlsplit(uri)
    return Path(unquote(address.path)) if address.scheme == "file" else None


def _what_lacks(local: Path, missing: Sequence[AnchorFile]) -> str:
    """What is wrong with a base, in a few words."""
    there = {path.name if path == local else path.relative_to(local).as_posix() for path in _files(local)}
    told = [f"{file.path} {'differs' if file.path in there else 'is not there'}" for file in missing[:NAMED]]
    return ", ".join([*told, *([f"and {len(missing) - NAMED} more"] if len(missing) > NAMED else [])])


def _files(folder: Path) -> Iterator[Path]:
    """Every file, or link to one, below a folder; a lone file itself."""
    if folder.is_file():
        yield folder
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)
