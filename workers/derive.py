"""Derive: publishes a version of a run in another served format, from the proven bytes of its source.

The source's state is read from this worker's own copy and quantised stripe by stripe while the patch is built: nothing
is written but the patch (and, for a first version, the checkpoint). The version is signed with a key that this worker
keeps, committed like any other, and validated by a job of its own. It may be killed anywhere and started again: the
same weights give the same bytes.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from controlplane import env
from controlplane.fleet import encoding
from controlplane.registry import deriving, keys, selectors, services
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Epoch, Run, RunKey, Version
from mailboat.checkpoint.files import Checkpoint, Layout
from mailboat.checkpoint.source import TensorSource
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import State, measure
from mailboat.errors import InventoryMismatch, ManifestError
from mailboat.identity import public_half
from mailboat.manifest import MANIFEST_TYPE, BlobRef, Envelope, ParentRef, PatchRef
from mailboat.patch import build_patch
from mailboat.quantise.source import QuantisedSource
from mailboat.signing import sign
from workers.build import copy_files, made_manifest
from workers.copy import Copy
from workers.history import History
from workers.materials import open_anchor, recorded_state, require_same
from workers.work import Parked, Work

_VALIDATION = timedelta(seconds=2)  # until another look is taken at the version before


def derive(work: Work) -> dict[str, Any]:
    """The job of one version of the source."""
    run, started = work.job.run, time.monotonic()
    if run is None or run.source is None:
        raise ManifestError("The job names no derived run; queue it again.")
    source = selectors.version(run.source, int(work.params["version"]))
    if source.state != Version.State.READY:
        raise Refusal(f"Version {source.number} of {run.source.name} is {source.state}.", code="not_ready")
    newest = Version.objects.filter(run=run).order_by("-number").first()
    if newest is not None and newest.number >= source.number:
        return {"version": newest.number, "state": newest.state_digest, "skipped": newest.number != source.number}
    _await_validation(run)
    step = Step(work, run, source, deriving.follow_epoch(run, source))
    with History(work, run.source) as history:
        version = history.healing(lambda: step.take(history))
    work.log(f"Version {version.number} is committed: {version.patch_bytes or version.full_bytes} bytes.")
    return {
        "version": version.number,
        "state": version.state_digest,
        "bytes": version.patch_bytes,
        "seconds": round(time.monotonic() - started, 3),
    }


def quantised(run: Run, bytes_of_source: TensorSource) -> QuantisedSource:
    """What a derived run serves in place of these bytes."""
    return QuantisedSource(bytes_of_source, str((run.quantiser or {}).get("format", run.served_format)))


def _await_validation(run: Run) -> None:
    """Lets the worker go while the version before is proven: the next patch starts from what is ready."""

    def pending() -> bool:
        return Version.objects.filter(run=run, state__in=Version.IN_FLIGHT).exists()

    if pending():
        raise Parked("the validation of the version before", until=_VALIDATION, saved={}, still=pending)


@dataclass(frozen=True)
class Step:
    """One version of `run` on its way: that of `source`, in the epoch of the same number."""

    work: Work
    run: Run
    source: Version
    epoch: Epoch

    def take(self, history: History) -> Version:
        """Builds and commits it from the source's proven bytes."""
        what = f"The copy of version {self.source.number}"
        with history.pair(self.source, self.source) as (proven, _):
            found = measure(proven, progress=lambda _: self.work.check())
            require_same(recorded_state(self.source), found, what)
            served, base = quantised(self.run, proven), self._base()
            if base is not None:
                with suppress(InventoryMismatch):  # the source's tensors may have changed with its epoch
                    return self._patch(served, base)
            return self._anchor(served)

    def _base(self) -> Version | None:
        """The version that the next patch starts from; None when it has to stand alone."""
        ready = Version.objects.filter(run=self.run, state=Version.State.READY).order_by("-number")
        return ready.filter(epoch=self.epoch).first() or self.epoch.from_version or ready.first()

    def _patch(self, served: QuantisedSource, base: Version) -> Version:
        out = self.work.scratch / "part-0.mbp"
        progress = self.work.bytes_of(served.inventory.full_bytes)
        with Copy(self.work, self.run) as copy:
            image = copy.bring_to(base)
            wanted = encoding.wanted(self.run)
            built = build_patch(image, served, out, base_state=image.state, progress=progress, encode_for=wanted)
        self.work.check()
        blob = services.add_blob(self.run, out)
        patch = PatchRef((BlobRef(blob.sha256, blob.size),), built.changed)
        return self._commit(built.target_state, ParentRef(base.number, base.state_digest), patch, None)

    def _anchor(self, served: QuantisedSource) -> Version:
        folder = self.work.scratch / "checkpoint"
        write_checkpoint(served, folder, layout=Layout.canonical(served.inventory, is_folder=True))
        with Checkpoint.open(folder, aliases=dict(served.inventory.aliases)) as checkpoint:
            files = copy_files(self.work, self.run, checkpoint)
        with open_anchor(self.run, files, self.work.scratch, served.inventory.aliases) as copied:
            state = measure(copied, progress=self.work.bytes_of(copied.inventory.full_bytes))
        self.work.check()
        return self._commit(state, None, None, files)

    def _commit(
        self, state: State, parent: ParentRef | None, patch: PatchRef | None, anchor: list[dict[str, Any]] | None
    ) -> Version:
        place = self.run, self.epoch.number, self.source.number
        manifest = made_manifest(place, state, parent, patch, self.source.step)
        envelope = sign(Envelope.wrap(MANIFEST_TYPE, manifest.to_bytes()), signing_key(self.run)).to_dict()
        actor = f"job:{self.work.job.pk}"
        return services.commit_manifest(self.run, envelope, anchor, source=self.source, actor=actor)[0]


def signing_key(run: Run) -> str:
    """This worker's private key for a derived run (hex), made and registered on first use; it never leaves the home
    folder.
    """
    private = env.kept_secret(f"derived-{run.pk}")
    public = public_half(private)
    if not RunKey.objects.filter(run=run, public_key=public).exists():
        keys.register(run, public, name=f"quantiser of {run.name}"[:80], kind=RunKey.Kind.DERIVED, actor="system")
    return private
