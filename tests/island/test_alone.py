"""An island that follows the blob store while the control plane is away, and what it says when that is back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mailboat.island.bucket import BucketApi
from tests.island.contract_server import CHANNEL, PROJECT, RUN, ContractServer, Fault
from tests.island.fleet import Trainer, island
from tests.waiting import eventually

ISLANDS_CALLS = "POST islands.*|GET runs/voyage/(channels|plan|blobs|trust|versions/[0-9]+/manifest).*"
FOR_EVER = 1 << 30


def part_of(server: ContractServer, number: int) -> str:
    """The digest of a version's patch part."""
    patch = server.versions[number].manifest.patch
    assert patch is not None
    return patch.parts[0].sha256


def copied(server: ContractServer, folder: Path) -> Path:
    """The blob store as the control plane writes it; the head comes last."""
    files = {f"blobs/{sha256}": data for sha256, data in server.blobs.items()}
    for number, version in server.versions.items():
        if version.anchor:
            files[f"anchors/{number}.json"] = json.dumps(version.anchor).encode()
        files[f"versions/{number}.json"] = version.envelope.to_json()
    assert server.head is not None
    files[f"channels/{CHANNEL}.json"] = server.signed_head(server.head).to_json()
    for name, data in files.items():
        path = folder / "runs" / server.run_id / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name("new").write_bytes(data)
        path.with_name("new").replace(path)
    return folder


def held(store: Path) -> int:
    """The version in an island's store."""
    return int(json.loads((store / "marker.json").read_text())["version"])


@pytest.mark.parametrize("answer", [500, 503])
def test_what_was_reached_alone_is_reported_although_the_next_version_can_not_be_fetched(
    server: ContractServer, tmp_path: Path, answer: int
) -> None:
    blobs, store = tmp_path / "blobs", tmp_path / "store"
    blobs.mkdir()
    with Trainer(server, tmp_path) as trainer, island(server, store, poll_seconds=0.1, blob_url=blobs.as_uri()):
        trainer.step()
        server.wait_for(lambda: server.applied(0))
        server.faults = [Fault(ISLANDS_CALLS, "refuse", times=FOR_EVER)]
        trainer.step()
        copied(server, blobs)
        eventually(lambda: held(store) == 1)
        trainer.step()
        part = part_of(server, 2)
        server.blobs[part] = b"x" * len(server.blobs[part])
        copied(server, blobs)
        server.faults = [Fault(f"GET .*/blobs/{part}", "status", answer, times=FOR_EVER)]
        server.wait_for(lambda: server.applied(1))
        assert held(store) == 1


@pytest.mark.parametrize(("status", "away"), [(500, False), (502, True), (503, True), (504, True)])
def test_one_damaged_blob_does_not_make_the_control_plane_count_as_away(
    server: ContractServer, tmp_path: Path, status: int, away: bool
) -> None:
    sha256 = server.put(b"bytes")
    path = tmp_path / "runs" / server.run_id / "blobs" / sha256
    path.parent.mkdir(parents=True)
    path.write_bytes(b"bytes")
    api = BucketApi(server.address, PROJECT, blob_url=tmp_path.as_uri())
    api.run_id = server.run_id
    server.faults = [Fault("GET .*/blobs/.*", "status", status)]
    assert api.open_blob(RUN, sha256).read() == b"bytes", "the store has it"
    assert api.away is away
    api.close()
