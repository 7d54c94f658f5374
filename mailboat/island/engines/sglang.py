"""SGLang (0.5.17+) over its own HTTP surface: pause, reload from the image, continue.

Its defaults are traps, so nothing is left to them: pausing aborts unless the mode is sent, a reload flushes the cache
and asserts when requests are resident, the label call aborts everything. Success stands in the body, not in the status.
"""

from __future__ import annotations

from typing import Any

from mailboat.digest import Sums
from mailboat.image import Image, Overlay
from mailboat.island.engines.control import LEASE, Control, NoSuchRoute
from mailboat.island.engines.engine import EngineError, EngineRefused, Look, Staged


class SglangServer:
    """One SGLang server."""

    kind = "sglang"

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._control = Control(url)
        self._label = ""

    def abandon(self) -> None:
        """Ends all calls."""
        self._control.abandon()

    def look(self) -> Look:
        """`GET /model_info`; older servers call it `/get_model_info`."""
        try:
            info = self._control.get("/model_info")
        except NoSuchRoute:
            info = self._control.get("/get_model_info")
        return Look(str(info["weight_version"]) if isinstance(info, dict) and "weight_version" in info else None)

    def keyed_routes(self) -> frozenset[str]:
        """None: what takes `extra_key` takes it in every build."""
        return frozenset()

    def stage(self, image: Image, overlay: Overlay) -> Staged | None:  # noqa: ARG002
        """SGLang has no hook for sparse writes: always the image."""
        return None

    def drop(self, staged: Staged) -> None:
        """Nothing is staged."""

    def pause(self, *, resident: bool) -> None:
        """`in_place` keeps requests and their keys; with nothing resident `retract` leaves no keys behind."""
        self._done("/pause_generation", {"mode": "in_place" if resident else "retract"})

    def write(self, staged: Staged, image: Image) -> Sums:  # noqa: ARG002
        """Not possible."""
        raise EngineRefused("SGLang takes no sparse writes.")

    def reload(self, image: Image) -> None:
        """`update_weights_from_disk`: every field is sent, none left to its default."""
        self._done(
            "/update_weights_from_disk",
            {"model_path": str(image.folder), "flush_cache": False, "abort_all_requests": False} | self._versioned(),
            seconds=LEASE,
        )

    def _versioned(self) -> dict[str, str]:
        # The label goes with the weights in one call, so there is no moment with new weights and an old label.
        return {"weight_version": self._label} if self._label else {}

    def expect(self, label: str) -> None:
        """The label that the next reload leads to."""
        self._label = label

    def label(self, text: str) -> None:
        """A label without new weights."""
        if self.look().label != text:
            self._done("/update_weight_version", {"new_version": text, "abort_all_requests": False})

    def resume(self) -> None:
        """`continue_generation`."""
        self._done("/continue_generation", {})

    def reset_cache(self) -> None:
        """`flush_cache`; refused with 400 when requests are pending: then nothing has been touched."""
        self._done("/flush_cache", None)

    def live_sums(self, image: Image) -> Sums | None:  # noqa: ARG002
        """SGLang's checksums are of dequantised values in its own layout: they prove no bytes."""
        return None

    def _done(self, path: str, body: dict[str, Any] | None, *, seconds: float = 30.0) -> None:
        answer = self._control.post(path, body, seconds=seconds)
        if isinstance(answer, dict) and answer.get("success") is False:
            message = answer.get("message") or answer.get("error_message") or "no reason given"
            raise EngineError(f"The engine at {self.url} did not carry {path} out: {message}")
