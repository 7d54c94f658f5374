"""The image: proved before it is touched, absolute bytes, refused after an interrupted commit."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.side_files import side_file
from mailboat.checkpoint.source import ArraySource
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import State, measure
from mailboat.errors import DigestMismatch, DiskFull, InventoryMismatch, MailboatError, StoreError, WrongBase
from mailboat.image import DIRTY_FILE, STATE_FILE, Image
from mailboat.overlay import Overlay
from mailboat.patch import PartSpec, build_patch, new_bytes
from mailboat.patch.decode import Decoded
from tests.patch.models import built, changed, random_bits, read, source, written

SHAPE = (300, 256)


def model(seed: int, share: float = 0.02, **side: bytes) -> ArraySource:
    """Version `seed` of one model: every version differs from version 0 in its own way."""
    tensors = {}
    for number, dtype in enumerate(("BF16", "F32", "U8", "I16")):
        width = {"BF16": 2, "F32": 4, "U8": 1, "I16": 2}[dtype]
        bits = random_bits(dtype, SHAPE, number)
        moved = changed(bits, width, share, 100 * seed + number) if seed and number != 3 else bits
        tensors[f"layer.{number}"] = (dtype, SHAPE, moved)
    files = {"config.json": f'{{"v":{seed}}}'.encode()} | {name.replace("_", "."): data for name, data in side.items()}
    return source(tensors, files)


@pytest.fixture
def image(tmp_path: Path) -> Image:
    base = model(0, old_txt=b"0")
    return Image.create(tmp_path / "image", base, measure(base))


def step(folder: Path, base: ArraySource, target: ArraySource, name: str = "patch") -> tuple[list[Path], State]:
    """(parts, target state) of the patch between two sources."""
    patch = built(folder, base, target, name)
    return [patch.path], patch.target_state


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_versions_follow_one_another(tmp_path: Path, image: Image) -> None:
    known = model(0, old_txt=b"0")
    for number, share in ((1, 0.001), (2, 0.3), (3, 1.0), (4, 0.0)):
        target = model(number, share, new_txt=bytes(number))
        parts, state = step(tmp_path, known, target)
        overlay = image.prepare(parts, state)
        assert measure(image.overlaid(overlay)).digest == state.digest
        assert image.measure().digest == measure(known).digest
        image.commit(overlay)
        overlay.close()
        image.verify_sums()
        assert image.measure().digest == state.digest == image.digest
        assert {file.path for file in image.side_files} == {"config.json", "new.txt"}
        known = target
    with Image.open(tmp_path / "image") as opened, Checkpoint.open(tmp_path / "image") as checkpoint:
        assert opened.digest == image.digest == measure(checkpoint).digest
        assert (opened.state.sums == measure(checkpoint).sums).all()


@pytest.mark.parametrize("shares", [(0.001, 0.002, 0.001), (0.3, 0.01, 0.0), (0.01, 1.0, 0.02), (1.0, 0.3, 1.0)])
def test_a_route_of_several_patches_is_one_overlay(
    shares: tuple[float, ...], tmp_path: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, layers, before = model(0, old_txt=b"0"), [], image.measure().digest
    for number, share in enumerate(shares, 1):
        sides = {"new_txt": bytes(number)} if number < len(shares) else {"last_txt": b"1"}
        target = model(number, share, **sides)
        parts, state = step(tmp_path, known, target, f"patch{number}")
        if layers:
            with pytest.raises(WrongBase):
                image.prepare(parts, state)
        layers.append(image.prepare(parts, state, over=layers))
        known = target
    whole = Overlay.stacked(layers, tmp_path)
    assert image.measure().digest == before, "nothing was touched"
    elements = sum(tensor.elements for tensor in image.inventory.tensors)
    assert 0 < whole.changed <= elements, "each element is written once"
    monkeypatch.setattr(new_bytes, "IN_MEMORY", 1000)
    spilled = Overlay.stacked(layers, tmp_path)
    for layer in layers:
        layer.close()
    assert measure(image.overlaid(spilled)).digest == measure(image.overlaid(whole)).digest == state.digest
    spilled.close()
    image.commit(whole)
    whole.close()
    image.verify_sums()
    assert image.measure().digest == measure(known).digest
    assert {file.path for file in image.side_files} == {"config.json", "last.txt"}


def test_repeating_a_commit_is_harmless(tmp_path: Path, image: Image) -> None:
    parts, state = step(tmp_path, model(0, old_txt=b"0"), model(1))
    overlay = image.prepare(parts, state)
    for _ in range(2):
        image.commit(overlay)
        assert image.measure().digest == state.digest


def test_a_failed_commit_can_be_repeated_and_hides_the_image_until_then(
    tmp_path: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, state = step(tmp_path, model(0, old_txt=b"0"), model(1))
    overlay = image.prepare(parts, state)
    writes = iter([None, None])
    original = os.pwrite

    def full(*arguments: object) -> int:
        try:
            next(writes)
        except StopIteration:
            raise OSError(errno.ENOSPC, "no space") from None
        return original(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(DiskFull):
            image.commit(overlay)
    with pytest.raises(StoreError, match="interrupted"):
        image.read(0, 0, np.empty(2, np.uint8))
    with pytest.raises(StoreError, match="interrupted"):
        Image.open(image.folder)
    image.commit(overlay)
    assert image.measure().digest == state.digest
    Image.open(image.folder).close()


_CRASH = """
import os, signal, sys
from pathlib import Path
from mailboat.digest import State
from mailboat.checkpoint.inventory import Inventory
from mailboat.image import Image
from mailboat.checkpoint.files import Checkpoint
from mailboat.digest import measure
folder, patch, target, name, count = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
image = Image.open(folder)
with Checkpoint.open(target) as checkpoint:
    overlay = image.prepare([patch], measure(checkpoint))
original, left = getattr(os, name), [count]
def die(*arguments, **options):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **options)
setattr(os, name, die)
image.commit(overlay)
print("committed")
"""


@pytest.mark.parametrize(
    ("call", "count"), [("pwrite", 0), ("pwrite", 2), ("fdatasync", 0), ("replace", 1), ("replace", 2), ("fsync", 1)]
)
def test_a07_killed_in_a_commit_the_image_is_old_or_refused(tmp_path: Path, call: str, count: int) -> None:
    base, target = model(0, old_txt=b"0"), model(1)
    Image.create(tmp_path / "image", base, measure(base)).close()
    parts, state = step(tmp_path, base, target)
    path = written(tmp_path, "target", target)
    command = [sys.executable, "-c", _CRASH, str(tmp_path / "image"), str(parts[0]), str(path), call, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL, done.stderr
    try:
        with Image.open(tmp_path / "image") as opened:
            assert opened.measure().digest == opened.digest == measure(base).digest
    except StoreError as error:
        assert "interrupted" in str(error)
        rebuilt = Image.create(tmp_path / "image", base, measure(base))
        rebuilt.commit(rebuilt.prepare(parts, state))
        assert rebuilt.measure().digest == state.digest


def test_a06_wrong_base_wrong_target_and_wrong_bytes_touch_nothing(tmp_path: Path, image: Image) -> None:
    versions = [model(0, old_txt=b"0"), model(1), model(2), model(3)]
    ahead, state_ahead = step(tmp_path, versions[1], versions[2], "ahead")
    good, state = step(tmp_path, versions[0], versions[1], "good")
    before = files(image.folder)
    with pytest.raises(WrongBase):
        image.prepare(ahead, state_ahead)
    with pytest.raises(DigestMismatch, match="leads to"):
        image.prepare(good, state_ahead)
    lying = State(state.inventory, state.sums + np.uint64(1), state.strong, state.side_files)
    with pytest.raises(DigestMismatch, match=r"promised sums of layer\.0, layer\.1, layer\.2, layer\.3"):
        image.prepare(good, lying)
    other = source({"t": ("U8", (3,), random_bits("U8", (3,), 1))})
    with pytest.raises(InventoryMismatch):
        image.prepare(good, measure(other))
    assert files(image.folder) == before
    overlay = image.prepare(good, state)
    image.commit(overlay)
    follow = image.prepare(ahead, state_ahead)
    image.commit(follow)
    with pytest.raises(WrongBase, match="prepared against another state"):
        image.commit(overlay)
    assert image.measure().digest == state_ahead.digest


def test_a30_all_parts_or_none(tmp_path: Path, image: Image) -> None:
    base, target = model(0, old_txt=b"0"), model(1)
    parts = [
        build_patch(base, target, tmp_path / f"part{i}", part=PartSpec(i, 2, indices))
        for i, indices in enumerate([(0, 2), (1, 3)])
    ]
    state = parts[0].target_state
    with pytest.raises(MailboatError):
        image.prepare([parts[0].path], state)
    overlay = image.prepare([parts[1].path, parts[0].path], state)
    assert overlay.changed == parts[0].changed + parts[1].changed
    image.commit(overlay)
    assert image.measure().digest == state.digest


def test_an_image_that_is_not_whole_is_refused(tmp_path: Path, image: Image) -> None:
    with pytest.raises(StoreError, match="There is no image"):
        Image.open(tmp_path / "nowhere")
    for damage in ("cut", "state", "side", "dirty", "gone"):
        folder = tmp_path / damage
        shutil.copytree(image.folder, folder)
        if damage == "cut":
            os.truncate(folder / "model.safetensors", 1000)
        elif damage == "state":
            raw = bytearray((folder / STATE_FILE).read_bytes())
            raw[len(raw) // 2] ^= 1
            (folder / STATE_FILE).write_bytes(raw)
        elif damage == "side":
            (folder / "config.json").write_bytes(b"[]")
        elif damage == "dirty":
            (folder / DIRTY_FILE).touch()
        else:
            (folder / "model.safetensors").unlink()
        with pytest.raises(StoreError):
            Image.open(folder)


def test_a_flipped_bit_is_found_by_the_scan(image: Image) -> None:
    with (image.folder / "model.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 4]))
    with pytest.raises(DigestMismatch, match=r"layer\.\d"):
        image.verify_sums()
    assert image.measure().digest != image.digest


def test_create_refuses_bytes_that_are_not_those_of_the_state(tmp_path: Path) -> None:
    base = model(0)
    with pytest.raises(DigestMismatch):
        Image.create(tmp_path / "image", base, measure(model(1)))
    assert list(tmp_path.iterdir()) == []


def test_create_replaces_what_is_there(tmp_path: Path, image: Image) -> None:
    again = Image.create(image.folder, model(1), measure(model(1)))
    assert again.measure().digest == measure(model(1)).digest
    assert [path.name for path in tmp_path.iterdir()] == ["image"]


def test_a_lone_file_becomes_an_image_with_the_same_digest(tmp_path: Path) -> None:
    base = source({"t": ("BF16", (8, 8), random_bits("BF16", (8, 8), 1))})
    write_checkpoint(base, tmp_path / "v1.safetensors")
    with Checkpoint.open(tmp_path / "v1.safetensors") as checkpoint:
        image = Image.create(tmp_path / "image", checkpoint, measure(checkpoint))
    assert image.measure().digest == measure(base).digest
    assert (tmp_path / "image" / "model.safetensors").read_bytes() == (tmp_path / "v1.safetensors").read_bytes()


def test_stored_copies_of_tied_tensors_move_along(tmp_path: Path) -> None:
    def tied(seed: int) -> ArraySource:
        bits = changed(random_bits("BF16", (90, 16), 1), 2, 0.05, seed).view(np.uint16).reshape(90, 16)
        return ArraySource(
            {"model.embed_tokens.weight": bits, "lm_head.weight": bits.copy()},
            dtypes=dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), "BF16"),
            side_files={"config.json": b'{"tie_word_embeddings":true}'},
        )

    from safetensors.numpy import save_file

    folder = tmp_path / "base"
    folder.mkdir()
    bits = np.frombuffer(read(tied(1), 0), np.float16).reshape(90, 16)
    save_file({"model.embed_tokens.weight": bits, "lm_head.weight": bits.copy()}, folder / "model.safetensors")
    (folder / "config.json").write_bytes(b'{"tie_word_embeddings":true}')
    with Checkpoint.open(folder) as base:
        moved = np.frombuffer(read(tied(2), 0), np.float16).reshape(90, 16)
        target = ArraySource(
            {"model.embed_tokens.weight": moved}, side_files={"config.json": b'{"tie_word_embeddings":true}'}
        )
        image = Image.create(tmp_path / "image", base, measure(base))
        patch = build_patch(base, target, tmp_path / "patch")
        image.commit(image.prepare([patch.path], patch.target_state))
    with Checkpoint.open(tmp_path / "image") as checkpoint:  # opening compares the two copies
        assert measure(checkpoint).digest == measure(target).digest
        assert len(checkpoint.shards[0].header.entries) == 2


def test_side_files_may_turn_into_folders_and_back(tmp_path: Path) -> None:
    tensor = {"t": ("U8", (4,), random_bits("U8", (4,), 1))}
    versions = [source(tensor, side) for side in ({"a": b"1"}, {"a/b/c": b"2"}, {"a/b": b"3"}, {})]
    image = Image.create(tmp_path / "image", versions[0], measure(versions[0]))
    for before, after in pairwise(versions):
        parts, state = step(tmp_path, before, after)
        image.commit(image.prepare(parts, state))
        assert image.measure().digest == state.digest
        Image.open(image.folder).close()


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 600),
    st.integers(0, 600),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0.01, 0.2, 0.9]),
    st.data(),
)
def test_an_overlay_reads_right_at_any_cut(
    start: int, size: int, width: int, share: float, data: st.DataObject
) -> None:
    bits = random_bits("U8", (64 * 8,), 1)
    dtype = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}[width]
    base = source({"t": (dtype, (512 // width,), bits)})
    new = changed(bits, width, share, data.draw(st.integers(0, 99)), step=0)
    overlay = Overlay(measure(base).digest, measure(source({"t": (dtype, (512 // width,), new)})), Path("/tmp"))
    half = 256
    for at in (0, half):
        old_part, new_part = bits[at : at + half].view(f"u{width}"), new[at : at + half].view(f"u{width}")
        positions = np.flatnonzero(old_part != new_part).astype(np.uint32)
        if positions.size:
            elements = np.ascontiguousarray(new_part[positions]).view(np.uint8)
            few = positions.size * (4 + width) < half
            overlay.add(
                Decoded(
                    index=0, start=at, nbytes=half, width=width, changed=positions.size,
                    positions=positions if few else positions[:0], new=elements if few else new[at : at + half],
                    change=np.zeros(2, np.uint64),
                )
            )  # fmt: skip
    overlay.finish()
    start = min(start, 512)
    out = bits[start : start + size].copy()
    overlay.lay_over(0, start, out)
    assert (out == new[start : start + size]).all()
    overlay.close()


def test_a_large_overlay_goes_to_a_file_that_has_no_name(
    tmp_path: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_bytes, "IN_MEMORY", 1000)
    parts, state = step(tmp_path, model(0, old_txt=b"0"), model(1, 1.0))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    overlay = image.prepare(parts, state, scratch=scratch)
    assert overlay.nbytes > 1000
    assert list(scratch.iterdir()) == []
    assert measure(image.overlaid(overlay)).digest == state.digest
    image.commit(overlay)
    overlay.close()
    overlay.close()
    assert image.measure().digest == state.digest


def test_a_commit_writes_what_changed_and_little_more(
    tmp_path: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = random_bits("BF16", SHAPE, 0)
    few = bits.copy()
    few[[10, 11, 50_000, 90_001]] ^= 1
    target = replace_tensor(model(0, old_txt=b"0"), few)
    parts, state = step(tmp_path, model(0, old_txt=b"0"), target)
    overlay = image.prepare(parts, state)
    sizes: list[int] = []
    original = os.pwrite

    def counted(descriptor: int, data: memoryview, offset: int) -> int:
        sizes.append(len(data))
        return original(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", counted)
    image.commit(overlay)
    assert sum(sizes) <= 8
    assert len(sizes) == 3


def replace_tensor(content: ArraySource, bits: np.ndarray) -> ArraySource:
    """The same model with other bits in its first tensor."""
    tensors = {
        t.name: (t.dtype, t.shape, bits if i == 0 else np.frombuffer(read(content, i), np.uint8))
        for i, t in enumerate(content.inventory.tensors)
    }
    return source(tensors, {file.path: content.read_side(file.path) for file in content.side_files})


def test_state_with_other_side_files_is_refused(tmp_path: Path, image: Image) -> None:
    parts, state = step(tmp_path, model(0, old_txt=b"0"), model(1))
    with pytest.raises(DigestMismatch):
        image.prepare(parts, replace(state, side_files=()))


def test_what_is_no_image_is_never_replaced(tmp_path: Path) -> None:
    base = model(0)
    write_checkpoint(base, tmp_path / "weights")
    (tmp_path / "letter").write_text("dear")
    before = files(tmp_path)
    for name in ("weights", "letter"):
        with pytest.raises(StoreError, match="something else than an image"):
            Image.create(tmp_path / name, base, measure(base))
    assert files(tmp_path) == before
    (tmp_path / "empty").mkdir()
    Image.create(tmp_path / "empty", base, measure(base)).close()


def test_a_commit_that_failed_late_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = {"t": ("U8", (4,), random_bits("U8", (4,), 1))}
    for number, (old, new) in enumerate(
        [({"a/b": b"1"}, {}), ({"a": b"1"}, {"a/b": b"2"}), ({"a/b": b"1"}, {"a": b"2"})]
    ):
        before, after = source(tensor, old), source(tensor, new)
        image = Image.create(tmp_path / f"image{number}", before, measure(before))
        parts, state = step(tmp_path, before, after)
        overlay = image.prepare(parts, state)

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "no space")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", full)
            with pytest.raises(DiskFull):
                image.commit(overlay)
        image.commit(overlay)
        assert image.measure().digest == state.digest
        Image.open(image.folder).close()


@pytest.mark.parametrize("config", [b'{"v":1', b'{"quantization_config":{"bits":4}}'])
def test_a_config_that_makes_another_model_is_refused_before_anything_is_written(
    tmp_path: Path, image: Image, config: bytes
) -> None:
    target = model(1)
    target._side = {"config.json": config}
    target._side_files = (side_file("config.json", config),)
    parts, state = step(tmp_path, model(0, old_txt=b"0"), target)
    before = files(tmp_path)
    with pytest.raises(MailboatError, match=r"config\.json"):
        image.prepare(parts, state)
    assert files(tmp_path) == before
