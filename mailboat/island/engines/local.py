"""A transformers model in this process: the engine of demos and tests, and the proof that writing in place works.

Its tensors are its own: they are filled from the image by reading, never mapped from a file, so that writing the image
can't reach them and writing them can't reach the image. torch and transformers are imported when the first weights
come. Requests are answered by `local_http`, through a loopback port like any other engine's.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mailboat import compiled
from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.side_files import SideFile
from mailboat.checkpoint.source import Bytes
from mailboat.digest import Sums, measure_sums
from mailboat.errors import listed
from mailboat.image import Image, Overlay
from mailboat.island.engines.engine import EngineRefused, Look, Staged
from mailboat.island.engines.local_http import Generator, LocalHttp
from mailboat.patch import blocks
from mailboat.patch.format import Geometry
from mailboat.patch.scratch import thread_count

_MOST_ELEMENTS = 1 << 32  # of a tensor: positions are 32 bits wide
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


class Live:
    """The live tensors by the inventory's order, as bytes; reads like any source of tensors."""

    side_files: tuple[SideFile, ...] = ()

    def __init__(self, inventory: Inventory, views: list[Bytes]) -> None:
        self.inventory = inventory
        self.views = views

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with live bytes."""
        out[:] = self.views[index][offset : offset + out.size]

    def read_side(self, path: str) -> bytes:
        """There are none."""
        raise KeyError(path)


class LocalServer:
    """The engine; its HTTP side listens on a free loopback port."""

    kind = "local"

    def __init__(self) -> None:
        self._generator = Generator()
        self._http = LocalHttp(self._generator)
        self.url = self._http.url
        self._label: str | None = None
        self._live: Live | None = None
        self._config: tuple[SideFile, ...] = ()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(thread_count(None), "local engine")

    def close(self) -> None:
        """Ends the HTTP side and the generation thread."""
        self._http.close()
        self._generator.close()
        self._pool.shutdown(wait=False)

    def abandon(self) -> None:
        """Nothing is waited for that another process has to do."""

    def look(self) -> Look:
        """It lives as long as this process."""
        return Look(self._label)

    def expect(self, label: str) -> None:
        """The label is a call of its own here."""

    def keyed_routes(self) -> frozenset[str]:
        """There is no prefix cache."""
        return frozenset()

    def stage(self, image: Image, overlay: Overlay) -> Staged | None:
        """Any overlay of the same inventory; other side files may be another tokeniser and need a whole load."""
        live = self._live
        if live is None or overlay.side_paths or live.inventory.digest != image.inventory.digest:
            return None
        if any(tensor.nbytes // tensor.width > _MOST_ELEMENTS for tensor in live.inventory.tensors):
            return None
        return Staged({"live": live, "shares": _shares(_changes_of(overlay, live), thread_count(None))})

    def drop(self, staged: Staged) -> None:
        """Its memory goes with it."""

    def pause(self, *, resident: bool) -> None:  # noqa: ARG002
        """Waits for the step under way; requests keep their keys and values."""
        self._generator.pause()

    def resume(self) -> None:
        """Goes on."""
        self._generator.resume()

    def label(self, text: str) -> None:
        """Keeps the label."""
        self._label = text

    def reset_cache(self) -> None:
        """There is no prefix cache."""

    def write(self, staged: Staged, image: Image) -> Sums:  # noqa: ARG002
        """Writes the changes into live memory, tensor by tensor; what was there is read back first, for the sums."""
        live = self._live
        if live is None or live is not staged.handle["live"]:
            raise EngineRefused("Other weights are loaded than the update was made for.")
        change = np.zeros((len(live.views), 2), np.uint64)
        list(self._pool.map(partial(_write, change), staged.handle["shares"]))
        return change

    def live_sums(self, image: Image) -> Sums | None:
        """The sums of live memory."""
        live = self._live
        if live is None or live.inventory.digest != image.inventory.digest:
            return None
        return measure_sums(live)

    def reload(self, image: Image) -> None:
        """Reads everything from the image; a new model only where configuration or inventory changed."""
        with self._lock:
            live = self._live
            if live is None or self._config != image.side_files or live.inventory.digest != image.inventory.digest:
                model, tokeniser = _model(image)
                live = Live(image.inventory, _views(model, image.inventory))
                _fill(live, image)
                self._generator.use(model, tokeniser)
                self._live, self._config = live, image.side_files
            else:
                _fill(live, image)


@dataclass(frozen=True, slots=True)
class _Changes:
    """New elements of one tensor at ascending positions, as words and as bytes, and all else that the kernels take, so
    that nothing is worked out while the engine stands still.
    """

    index: int
    view: Bytes
    positions: np.ndarray[Any, np.dtype[np.uint32]]
    words: np.ndarray[Any, np.dtype[np.uint64]]
    elements: Bytes
    before: Bytes  # room for as many
    width: int
    row_bytes: int
    seeds: blocks.Seeds


def _write(change: Sums, share: list[_Changes]) -> None:
    for new in share:
        # A loop that only reads waits for many places of memory at once; the two after it find them in the cache.
        compiled.gather(new.view, new.positions, new.width, new.before)
        compiled.sum_elements(
            _words_of(new.view), new.words, new.positions, new.width, new.row_bytes, 0, 0, *new.seeds,
            change[new.index],
        )  # fmt: skip
        compiled.scatter(new.positions, new.elements, new.width, 0, new.view)


def _shares(changes: list[_Changes], count: int) -> list[list[_Changes]]:
    """Changes by threads, about as many elements for each: one handing over for each thread, not for each tensor."""
    shares: list[list[_Changes]] = [[] for _ in range(count)]
    sizes = [0] * count
    for new in sorted(changes, key=lambda new: -new.positions.size):
        least = sizes.index(min(sizes))
        shares[least].append(new)
        sizes[least] += new.positions.size
    return [share for share in shares if share]


def _changes_of(overlay: Overlay, live: Live) -> list[_Changes]:
    """An overlay by tensors."""
    found = []
    for index, tensor in enumerate(overlay.target.inventory.tensors):
        positions, pieces = [], []
        for record in overlay.records(index, 0, tensor.nbytes):
            first = record.start // record.width
            if record.count:
                places, elements = overlay.elements(record)
                positions.append(places + np.uint32(first))
            else:
                positions.append(np.arange(first, first + record.nbytes // record.width, dtype=np.uint32))
                elements = overlay.block(record, 0, record.nbytes)
            pieces.append(elements)
        if positions:
            size = sum(piece.size for piece in pieces)
            words = np.zeros(-(-size // 8), np.uint64)
            np.concatenate(pieces, out=words.view(np.uint8)[:size])
            new = _Changes(
                index, live.views[index], np.concatenate(positions), words, words.view(np.uint8)[:size],
                np.zeros(size, np.uint8), tensor.width, Geometry.of(tensor).row_bytes, blocks.seeds_of(tensor),
            )  # fmt: skip
            found.append(new)
    return found


def _words_of(view: Bytes) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A tensor's bytes as words: in place where they fit, else a zero-padded copy."""
    if view.size % 8 == 0 and view.ctypes.data % 8 == 0:
        return view.view(np.uint64)
    words = np.zeros(-(-view.size // 8), np.uint64)
    words.view(np.uint8)[: view.size] = view
    return words


def _fill(live: Live, image: Image) -> None:
    for index, view in enumerate(live.views):
        image.read(index, 0, view)


def _model(image: Image) -> tuple[Any, Any]:
    """A model of the image's configuration in the inventory's dtype, with weights that don't matter yet."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise EngineRefused(f"The local engine needs {error.name}: pip install torch transformers") from error
    kinds = {tensor.dtype for tensor in image.inventory.tensors}
    if len(kinds) != 1 or (kind := kinds.pop()) not in _DTYPES:
        raise EngineRefused("The local engine takes weights of one floating type (BF16, F16, F32); use another engine.")
    try:
        config = AutoConfig.from_pretrained(image.folder, local_files_only=True)
        tokeniser = AutoTokenizer.from_pretrained(image.folder, local_files_only=True)
        kind_of_torch = getattr(torch, _DTYPES[kind])
        model = AutoModelForCausalLM.from_config(config, dtype=kind_of_torch)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        raise EngineRefused(f"transformers can't build this model: {error}") from error
    model.eval()
    return model, tokeniser


def _views(model: Any, inventory: Inventory) -> list[Bytes]:
    """The bytes of every tensor in live memory. Raises EngineRefused unless each has its home and no home is left."""
    import torch

    parameters = dict(model.state_dict(keep_vars=True))
    missing = [tensor.name for tensor in inventory.tensors if tensor.name not in parameters]
    taken = {parameters[tensor.name].data_ptr() for tensor in inventory.tensors if tensor.name in parameters}
    left = [name for name, value in parameters.items() if value.data_ptr() not in taken]
    if missing or left:
        raise EngineRefused(f"Model and weights do not fit: {listed([*missing, *left])}.")
    views = []
    for tensor in inventory.tensors:
        live = parameters[tensor.name].detach()
        if tuple(live.shape) != tensor.shape or not live.is_contiguous():
            raise EngineRefused(
                f"{tensor.name} has the shape {tensor.shape} here and {tuple(live.shape)} in the model."
            )
        views.append(live.reshape(-1).view(torch.uint8).numpy())
    return views
