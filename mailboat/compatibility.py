"""Which releases of islands and control planes work together: neighbours do.

A release is MAJOR.MINOR; the first MINOR of a MAJOR follows the last of the one before. A control plane works with
islands of its own release, the one before, and the one after (so that an upgrade can be taken back). What they say to
each other may gain members between neighbours, never lose any; who does not know a member ignores it. From callers of
its own release and of older ones a control plane refuses members that it does not know: those are mistakes.
"""

from __future__ import annotations

import re

_RELEASE = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\D.*)?", re.ASCII | re.DOTALL)


def release(version: str) -> tuple[int, int] | None:
    """MAJOR and MINOR of a version; None when it is not written like one."""
    match = _RELEASE.fullmatch(version)
    return (int(match[1]), int(match[2])) if match else None


def neighbours(one: str, other: str) -> bool:
    """Whether these two versions work together. One that can't be read is given the benefit of the doubt."""
    low, high = release(one), release(other)
    if low is None or high is None:
        return True
    low, high = sorted((low, high))
    if low[0] == high[0]:
        return high[1] - low[1] <= 1
    return high == (low[0] + 1, 0)


def newer(one: str, other: str) -> bool:
    """Whether ``one`` is of a later release than ``other``; False when either can't be read."""
    first, second = release(one), release(other)
    return first is not None and second is not None and first > second
