"""Where a view changed since the states that the next patch may start from.

It must never name too few positions: where it does not know them all it says so.
"""

from __future__ import annotations

import sys
from typing import Any

from mailboat.trainer.in_place import longest_list


class Trail:
    """Positions (int64, on the view's device) that changed since an older and since a newer state of a view.

    Of more than one element in eight nothing is kept, so it takes at most two bytes for each of the view's elements.
    """

    def __init__(self, view: Any) -> None:
        self._most = longest_list(view.numel())
        self._nothing = sys.modules["torch"].empty(0, dtype=sys.modules["torch"].int64, device=view.device)
        self._between: Any = None  # changed from the older state to the newer one; None: not known
        self._after: list[Any] | None = None  # changed since the newer one

    def add(self, positions: Any) -> None:
        """These changed."""
        if self._after is None or not positions.numel():
            return
        self._after.append(positions)
        if sum(part.numel() for part in self._after) > self._most:
            joined = self._joined(self._after)
            self._after = None if joined.numel() > self._most else [joined]

    def since_newer(self) -> Any:
        """All positions that changed since the newer state, ascending; None where they are not known."""
        return None if self._after is None else self._joined(self._after)

    def since_older(self) -> Any:
        """All positions that changed since the older state, ascending; None where they are not known."""
        return None if self._between is None or self._after is None else self._joined([self._between, *self._after])

    def from_newer(self) -> None:
        """The newer state becomes the older one, and what the view holds now the newer."""
        self._between, self._after = self.since_newer(), []

    def from_older(self) -> None:
        """The older state stays; what the view holds now becomes the newer one."""
        self._between, self._after = self.since_older(), []

    def from_nowhere(self) -> None:
        """Of the older state nothing is known; what the view holds now becomes the newer one."""
        self._between, self._after = None, []

    def _joined(self, parts: list[Any]) -> Any:
        torch = sys.modules["torch"]
        return torch.unique(torch.cat([self._nothing, *parts]))
