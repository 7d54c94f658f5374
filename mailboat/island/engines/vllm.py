"""vLLM (0.26+) over its HTTP surface (`VLLM_SERVER_DEV_MODE=1`): way A reloads from the image, way B writes in place.

What a build can do is found out by asking, never by its version. Way B is used only after every rank has mapped every
tensor and the live sums have agreed with the image's: a wrong mapping is found before it writes anything.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mailboat.digest import Sums
from mailboat.errors import InventoryMismatch
from mailboat.image import Image, Overlay
from mailboat.island.engines.control import LEASE, Control, NoSuchRoute
from mailboat.island.engines.engine import (
    EngineAsleep,
    EngineBusy,
    EngineError,
    EngineRefused,
    EngineUnreachable,
    Look,
    Staged,
)
from mailboat.island.engines.openapi import routes_declaring
from mailboat.island.engines.staging import StagingFolder

_AWAKE = re.compile(r'vllm:engine_sleep_state\{.*sleep_state="awake".*\} ')


class VllmServer:
    """One vLLM server. ``say`` hears which way it is driven and why."""

    kind = "vllm"

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        self.url = url.rstrip("/")
        self._control = Control(url)
        self._say = say
        self._folder: StagingFolder | None = None
        self._opened: str | None = None  # the inventory that the workers have mapped and proven
        self._extended = False  # whether the workers have Mailboat's extension, as of the last load
        self._numbers = itertools.count(1)
        self._told = ""
        self._standing = False  # paused by this sidecar

    def close(self) -> None:
        """Removes what was staged."""
        if self._folder is not None:
            self._folder.close()

    def abandon(self) -> None:
        """Ends all calls."""
        self._control.abandon()

    def look(self) -> Look:
        """`/health`, whether it sleeps, then `/weight_info` where the build has it."""
        self._control.get("/health")
        self._require_awake(seconds=1.0, sure=False)
        try:
            info = self._control.get("/weight_info")
        except NoSuchRoute:
            return Look(None)
        except EngineUnreachable as silent:
            if silent.hung:  # its workers answer this between two steps, and the first ones compile
                raise EngineBusy(str(silent), hung=True) from silent
            raise
        return Look(str(info.get("weight_version")) if isinstance(info, dict) else None)

    def expect(self, label: str) -> None:
        """The label is a call of its own here."""

    def keyed_routes(self) -> frozenset[str]:
        """What `/openapi.json` says to take `cache_salt`; nothing where it is switched off or fails."""
        try:
            return routes_declaring("cache_salt", self._control.get("/openapi.json", seconds=60.0))
        except EngineUnreachable:
            raise
        except EngineError:
            return frozenset()

    # -- way B

    def stage(self, image: Image, overlay: Overlay) -> Staged | None:
        """Has every rank map the overlay; None when the workers have not mapped this inventory, or refuse."""
        if self._opened != image.inventory.digest or overlay.side_paths or self._folder is None:
            return None  # other side files may be another configuration: only a whole load takes them in
        number = next(self._numbers)
        path, written = self._folder.write_overlay(overlay, number)
        try:
            answers = self._collective("mailboat_stage", [str(path), number])
        except EngineUnreachable:
            raise
        except EngineError as problem:
            self._tell(f"reloads from the image: {problem}")
            return None
        finally:
            path.unlink(missing_ok=True)
        changed = sum(int(answer["changed"]) for answer in answers)
        if changed != written:
            self._tell(f"reloads from the image: its workers took {changed} of {written} changes")
            return None
        return Staged({"number": number, "tensors": len(image.inventory.tensors)})

    def drop(self, staged: Staged) -> None:  # noqa: ARG002
        """Gives the workers' memory back; the next overlay does so too."""
        try:
            self._collective("mailboat_drop", [])
        except EngineError:
            return

    def write(self, staged: Staged, image: Image) -> Sums:
        """Writes the staged overlay; the change of the sums, uint64 (N, 2)."""
        answers = self._collective("mailboat_write", [staged.handle["number"]], seconds=LEASE)
        return _added(answers, len(image.inventory.tensors))

    def live_sums(self, image: Image) -> Sums | None:
        """The sums of live memory by the extension; None without it, or when it can't map this inventory."""
        if not self._standing:  # else it was asked before it was paused
            self._require_awake(seconds=60.0)
        known = self._opened is not None
        if not self._open(image):
            return None
        try:
            answers = self._collective("mailboat_sums", [], seconds=LEASE)
        except EngineRefused:
            if not known:
                raise
            self._opened = None  # its workers are new
            return self.live_sums(image)
        return _added(answers, len(image.inventory.tensors))

    def _open(self, image: Image) -> bool:
        """Whether every rank maps the image's inventory and together they hold every element once."""
        inventory = image.inventory
        if self._opened == inventory.digest:
            return True
        self._extended = False
        try:
            self._collective("mailboat_hello", [])
            self._extended = True
            if self._folder is None:
                self._folder = StagingFolder()
            self._folder.write_inventory(inventory)
            answers = self._collective("mailboat_open", [str(self._folder.path)])
        except EngineUnreachable:
            raise
        except (EngineError, InventoryMismatch) as problem:
            self._tell(f"is driven by way A, reloading from the image: {problem}")
            return False
        covered = np.sum([answer["covered"] for answer in answers], axis=0)
        homeless = [
            tensor.name for tensor, count in zip(inventory.tensors, covered, strict=True) if count != tensor.elements
        ]
        if homeless:
            self._tell(
                f"is driven by way A: {homeless[0]} and {len(homeless) - 1} more have no whole home in its workers"
            )
            return False
        self._opened = inventory.digest
        self._tell("is driven by way B, writing in place")
        return True

    # -- both ways

    def pause(self, *, resident: bool) -> None:  # noqa: ARG002
        """`mode=keep` always: the default would abort every request. An engine that sleeps is left alone: a write would
        be its end.
        """
        self._require_awake(seconds=60.0)
        self._standing = True
        self._control.post("/pause", query={"mode": "keep"}, seconds=60)

    def _require_awake(self, *, seconds: float, sure: bool = True) -> None:
        """Raises EngineAsleep after `/sleep`; builds without it never sleep. Not ``sure``: an engine whose core does
        not answer in time, as in the middle of a long step, counts as awake.
        """
        try:
            answer = self._control.get("/is_sleeping", seconds=seconds)
            # It says true of an engine that is merely paused, too; which of the two it is stands in the metrics.
            asleep = isinstance(answer, dict) and answer.get("is_sleeping") is True and self._memory_is_away(seconds)
        except NoSuchRoute:
            return
        except EngineError:
            if sure:
                raise
            return
        if asleep:
            raise EngineAsleep(f"The engine at {self.url} sleeps; wake it up (POST /wake_up).")

    def _memory_is_away(self, seconds: float) -> bool:
        text = self._control.text("/metrics", seconds=seconds)
        return any(_AWAKE.match(line) and float(line.rpartition(" ")[2]) == 0 for line in text.splitlines())

    def reload(self, image: Image) -> None:
        """Way A: every worker reads the image's folder; afterwards its parameters may lie elsewhere."""
        self._opened = None
        path = {"weights_path": str(image.folder)}
        self._control.post("/collective_rpc", {"method": "reload_weights", "kwargs": path}, seconds=LEASE)
        if self._extended:
            self._collective("mailboat_repack", [], seconds=LEASE)

    def label(self, text: str) -> None:
        """`/update_weight_version`; builds without it have no label."""
        try:
            self._control.post("/update_weight_version", {"new_version": text})
        except NoSuchRoute:
            return

    def resume(self) -> None:
        """`/resume`."""
        self._control.post("/resume", seconds=60)
        self._standing = False

    def reset_cache(self) -> None:
        """`/reset_prefix_cache`, with what a connector holds outside the engine: refused as 200 `{"success": false}`
        while blocks are held. And what encoders made of images and sounds, which has no key at all.
        """
        answer = self._control.post("/reset_prefix_cache", query={"reset_external": "true"}, seconds=60.0)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineRefused(f"The engine at {self.url} can't reset its prefix cache while requests are resident.")
        try:
            self._control.post("/reset_encoder_cache")
        except NoSuchRoute:
            return

    def _collective(self, method: str, arguments: list[Any], *, seconds: float = 60.0) -> list[dict[str, Any]]:
        answer = self._control.post("/collective_rpc", {"method": method, "args": arguments}, seconds=seconds)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results or not all(isinstance(result, dict) for result in results):
            raise EngineRefused(f"The engine at {self.url} has no worker extension of Mailboat.")
        for result in results:
            if "refused" in result:
                raise EngineRefused(str(result["refused"]))
        return results

    def _tell(self, line: str) -> None:
        if self._told != line:
            self._told = line
            self._say(f"engine {self.url} {line}")


def _added(answers: list[dict[str, Any]], tensors: int) -> Sums:
    total = np.zeros((tensors, 2), np.uint64)
    for index, first, second in _rows(answers):
        total[index] += np.array([first, second], np.uint64)
    return total


def _rows(answers: list[dict[str, Any]]) -> Iterator[tuple[int, int, int]]:
    for answer in answers:
        for index, first, second in answer["sums"]:
            yield int(index), int(first), int(second)
