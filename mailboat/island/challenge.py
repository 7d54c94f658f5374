"""Answering a verify challenge: a keyed digest over fresh random ranges proves that these bytes are held (not that they
are used).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from mailboat.checkpoint.source import TensorSource
from mailboat.errors import MailboatError
from mailboat.island.holding import Holding
from mailboat.replies import ChallengeCommand

MAX_RANGES = 65_536
LONGEST_WAIT = 1.0  # seconds for a commit to end, so that beats go on during a rebuild
MAX_BYTES = 256 << 20  # of one challenge: what an island reads at most when it is asked


class ChallengeError(MailboatError):
    """A challenge that can't be answered."""

    code = "challenge_invalid"


def keyed_answer(source: TensorSource, nonce: bytes, ranges: Sequence[tuple[int, int, int]]) -> str:
    """BLAKE3 keyed with the nonce over, for each range: u32 tensor, u64 offset, u32 length (little-endian), the bytes.

    Ranges are (tensor's index in the inventory, byte offset, byte length). Raises ChallengeError when one lies outside.
    """
    tensors = source.inventory.tensors
    if len(nonce) != blake3.key_size or len(ranges) > MAX_RANGES or sum(length for _, _, length in ranges) > MAX_BYTES:
        raise ChallengeError("The challenge is too large or its nonce has not 32 bytes.")
    hasher = blake3(key=nonce)
    for index, offset, length in ranges:
        if not 0 <= index < len(tensors) or offset < 0 or length < 0 or offset + length > tensors[index].nbytes:
            raise ChallengeError("The challenge names bytes that the version does not have.")
        data = np.empty(length, np.uint8)
        source.read(index, offset, data)
        hasher.update(struct.pack("<IQI", index, offset, length))
        hasher.update(data.data)
    return hasher.hexdigest()


def answer(holding: Holding, command: ChallengeCommand) -> dict[str, Any]:
    """What to send back: the answer, or why there is none. Bound to the version held while the bytes are read."""
    moving: dict[str, Any] = {
        "version": None,
        "digest": None,
        "error": "The island is moving; it holds no version now.",
    }
    if not holding.lock.acquire(timeout=LONGEST_WAIT):
        return moving
    try:
        held, image = holding.held, holding.image
        if held is None or image is None or image.digest != held.state:
            return moving
        about: dict[str, Any] = {"version": held.version, "digest": held.state}
        if (held.version, held.state) != (command.version, command.digest):
            return about | {"error": f"The island holds version {held.version}."}
        try:
            return about | {"answer": keyed_answer(image, command.nonce, command.ranges)}
        except (MailboatError, OSError) as error:
            return about | {"error": str(error)}
    finally:
        holding.lock.release()
