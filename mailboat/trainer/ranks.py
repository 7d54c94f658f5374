"""What the processes of a training job that publish together tell one another, over gloo.

Every call is made by all of them, in the same order. A failure of one must fail all: none is left waiting for it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.side_files import SideFile
from mailboat.checkpoint.source import Bytes, TensorSource
from mailboat.errors import MailboatError

Result = TypeVar("Result")

# Ranks wait while rank 0 uploads an anchor or a version is validated. A rank that died is noticed at once.
PATIENCE = timedelta(hours=6)
_END = -1


class PeerFailed(MailboatError):  # noqa: N818 - as the library's other errors, named for what happened
    """Another rank could not do its share; its own error says why."""

    code = "peer_failed"


class Ranks:
    """The ranks of a process group (default: all of the job), with a gloo group of their own."""

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._dist = dist
        members = None if group is None else dist.get_process_group_ranks(group)
        # Those outside of `group` do not take part in making ours.
        alone = members is not None
        self._group = dist.new_group(members, timeout=PATIENCE, backend="gloo", use_local_synchronization=alone)
        self.rank: int = dist.get_rank(self._group)
        self.size: int = dist.get_world_size(self._group)
        hosts = self.tell((socket.gethostname(), _boot()))
        self.host = hosts.index(hosts[self.rank])
        self.hosts = [hosts.index(host) for host in hosts]

    @property
    def leads_host(self) -> bool:
        """Whether this is the first rank of its machine, which keeps the machine's copy of the last ready version."""
        return self.host == self.rank

    def close(self) -> None:
        """Leaves the group."""
        self._dist.destroy_process_group(self._group)

    def tell(self, value: Any) -> list[Any]:
        """What every rank tells, by rank."""
        said: list[Any] = [None] * self.size
        self._dist.all_gather_object(said, value, group=self._group)
        return said

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """Does `work` on every rank; returns all results, by rank.

        Where it fails, the error is raised as it is, and PeerFailed on the other ranks.
        """
        result: Result | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as problem:  # noqa: BLE001 - raised again below, once the others know
            error = problem
        said = self.tell((result, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for rank, (_, complaint) in enumerate(said):
            if complaint is not None:
                raise PeerFailed(f"Rank {rank} could not do its share: {complaint}")
        return [result for result, _ in said]

    def from_first(self, work: Callable[[], Result]) -> Result:
        """Does `work` on rank 0 alone; returns its result on every rank."""
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    # -- reading another rank's tensors

    def send(self, message: Any, to: int) -> None:
        """Sends a tensor."""
        self._dist.send(message, self._dist.get_global_rank(self._group, to), group=self._group)

    def receive(self, message: Any, sender: int) -> None:
        """Waits for a tensor of this size and dtype."""
        self._dist.recv(message, self._dist.get_global_rank(self._group, sender), group=self._group)


class Alone:
    """A process that publishes by itself, as the only one of its ranks."""

    rank = 0

    def tell(self, value: Any) -> list[Any]:
        """What every rank tells: this one's."""
        return [value]

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """Does `work`."""
        return [work()]


class Gathered:
    """On rank 0: all tensors, each piece fetched from the rank that owns it when it is read."""

    def __init__(self, ranks: Ranks, own: TensorSource, owners: list[int]) -> None:
        self._ranks, self._own, self._owners = ranks, own, owners
        self._lock = threading.Lock()

    @property
    def inventory(self) -> Inventory:
        """The tensors, in the order that `read` counts them."""
        return self._own.inventory

    @property
    def side_files(self) -> tuple[SideFile, ...]:
        """The side files, sorted by path."""
        return self._own.side_files

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes [offset, offset + len(out)) of tensor `index`."""
        import torch

        owner = self._owners[index]
        if owner == self._ranks.rank:
            self._own.read(index, offset, out)
            return
        with self._lock:
            self._ranks.send(torch.tensor([index, offset, out.size]), owner)
            self._ranks.receive(torch.from_numpy(out), owner)

    def read_side(self, path: str) -> bytes:
        """Return a side file whole."""
        return self._own.read_side(path)

    def end(self) -> None:
        """Lets the other ranks go on; they serve until then."""
        import torch

        for rank in range(1, self._ranks.size):
            self._ranks.send(torch.tensor([_END, 0, 0]), rank)


def serve(ranks: Ranks, own: TensorSource) -> None:
    """On the other ranks: gives rank 0 the pieces that it reads, until it ends."""
    import torch

    wish = torch.zeros(3, dtype=torch.int64)
    while True:
        ranks.receive(wish, 0)
        index, offset, size = wish.tolist()
        if index == _END:
            return
        piece = np.empty(size, np.uint8)
        own.read(index, offset, piece)
        ranks.send(torch.from_numpy(piece), 0)


def _boot() -> str:
    """Tells machines (and containers on one, together with their host names) apart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
