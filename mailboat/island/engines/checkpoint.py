"""The engine without an engine: the image itself is what is held. For mirrors, CPU islands and tests."""

from __future__ import annotations

from mailboat.image import Image, Overlay
from mailboat.island.members.roster import Alone, Members
from mailboat.island.sidecar.types import Applied


class CheckpointEngine:
    """Holds the weights in the image."""

    name = "checkpoint"
    fence = ""

    def __init__(self, members: Members | None = None) -> None:
        self._members = members or Alone()

    def load(self, image: Image, applied: Applied) -> None:
        """The image is the engine."""

    def commit(self, image: Image, overlay: Overlay, applied: Applied) -> None:
        """Writes the overlay, after all members have. A failure leaves an image that does not open again, so the
        island rebuilds it.
        """
        self._members.require_ready(applied.state)
        self._members.commit()
        image.commit(overlay)

    def relabel(self, image: Image, applied: Applied) -> None:
        """Nothing carries a label."""

    def verify(self, image: Image) -> None:
        """Scans everything that is held; raises DigestMismatch."""
        image.verify_sums()

    def audit(self, image: Image) -> None:
        """`verify` has scanned what there is."""

    def let_go(self) -> None:
        """Nothing is kept."""
