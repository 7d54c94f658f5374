"""The engine without an engine: the image itself is what is held. For mirrors, CPU islands and tests."""

from __future__ import annotations

from mailboat.image import Image, Overlay


class CheckpointEngine:
    """Holds the weights in the image."""

    name = "checkpoint"
    codecs = ("dense", "positional", "xor")

    def commit(self, image: Image, overlay: Overlay) -> None:
        """Writes the overlay. A failure leaves an image that does not open again, so the island rebuilds it."""
        image.commit(overlay)

    def verify(self, image: Image) -> None:
        """Scans everything that is held; raises DigestMismatch."""
        image.verify_sums()
