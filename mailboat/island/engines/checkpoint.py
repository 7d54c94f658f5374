"""The engine without an engine: the image itself is what is held. For mirrors, CPU islands and tests."""

from __future__ import annotations

from mailboat.image import Image, Overlay
from mailboat.island.sidecar.types import Applied


class CheckpointEngine:
    """Holds the weights in the image."""

    name = "checkpoint"
    codecs: tuple[str, ...] = ("dense", "positional", "xor")
    fence = ""

    def load(self, image: Image, applied: Applied) -> None:
        """The image is the engine."""

    def commit(self, image: Image, overlay: Overlay, applied: Applied) -> None:  # noqa: ARG002
        """Writes the overlay. A failure leaves an image that does not open again, so the island rebuilds it."""
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
