"""A56: a patch whose result has the promised sums but other bytes passes everything that only sums guard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource
from mailboat.digest import State, measure
from mailboat.errors import DigestMismatch
from mailboat.image import Image
from mailboat.patch import apply_patch, build_patch, merge_patches
from mailboat.route import prove
from tests.forgery import WORDS, second_preimage
from tests.patch.models import written
from tests.patch.test_contextual import stepped, weights
from tests.patch.test_hostile import put_together, taken_apart

SHAPE = (64, 4 * WORDS // 64)


def model(bits: np.ndarray) -> ArraySource:
    """One BF16 tensor of just so many words as the attack needs."""
    return ArraySource({"w": bits.reshape(SHAPE)}, dtypes={"w": "BF16"})


class Forgery:
    """A base, the state that was published after it, and a patch to other bytes under that state's names."""

    def __init__(self, folder: Path) -> None:
        bits = weights(4 * WORDS, 1)
        after = stepped(bits, 2)
        self.base, self.honest = model(bits), model(after)
        self.target: State = measure(self.honest)
        (tensor,) = self.honest.inventory.tensors
        forged = np.frombuffer(second_preimage(tensor, after.tobytes()), np.uint16).copy()
        assert (forged != after).any()
        assert (np.abs(forged.astype(np.int32) - after.astype(np.int32)) < 16).all(), "weights that look like weights"
        self.forged = model(forged)
        raw = build_patch(self.base, self.forged, folder / "forged").path.read_bytes()
        metadata, entries = taken_apart(raw)
        self.patch = folder / "forged"
        self.patch.write_bytes(put_together(metadata | {"to": self.target.digest}, entries))


@pytest.fixture(scope="module")
def forgery(tmp_path_factory: pytest.TempPathFactory) -> Forgery:
    return Forgery(tmp_path_factory.mktemp("forgery"))


def test_a56_sums_are_no_protection(forgery: Forgery) -> None:
    """The attack is real: both 64-bit sums are equal, the bytes and their strong digest are not."""
    found = measure(forgery.forged)
    assert (found.sums == forgery.target.sums).all()
    assert (found.strong != forgery.target.strong).any()
    assert found.digest != forgery.target.digest


def test_a56_an_image_that_is_only_given_sums_would_take_it_and_the_strong_digests_do_not(
    forgery: Forgery, tmp_path: Path
) -> None:
    with Image.create(tmp_path / "image", forgery.base, measure(forgery.base)) as image:
        overlay = image.prepare([forgery.patch], forgery.target, scratch=tmp_path)
        with pytest.raises(DigestMismatch):
            prove(image, overlay, forgery.target)
        overlay.close()
        assert image.measure().digest == measure(forgery.base).digest, "nothing was written"


def test_a56_apply_refuses_it(forgery: Forgery, tmp_path: Path) -> None:
    with Checkpoint.open(written(tmp_path, "base", forgery.base)) as base, pytest.raises(DigestMismatch):
        apply_patch(base, [forgery.patch], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a56_merge_refuses_it(forgery: Forgery, tmp_path: Path) -> None:
    with pytest.raises(DigestMismatch):
        merge_patches(forgery.base, [[forgery.patch]], tmp_path / "out", target=forgery.target)
    assert not (tmp_path / "out").exists()
