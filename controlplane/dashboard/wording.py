"""How numbers and digests are written for people. Pure functions; they must never reach for a database row."""

from __future__ import annotations

from mailboat import sizes

NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


def size(count: int | float | None) -> str:
    """Write a number of bytes, or that there is none."""
    return NOTHING if count is None else sizes.size(count)


def share(part: int | float | None, whole: int | float | None) -> str:
    """Write part of whole in per cent with as many digits as it needs to be told from zero."""
    if part is None or not whole:
        return NOTHING
    percent = 100 * part / whole
    if percent == 0:
        return "0 %"
    digits = 0 if percent >= 100 else 1 if percent >= 10 else 2 if percent >= 0.1 else 4
    return f"{percent:.{digits}f} %"


def times_smaller(part: int | float | None, whole: int | float | None) -> str:
    """Write how often part fits into whole, with a times sign."""
    if not part or not whole:
        return NOTHING
    ratio = whole / part
    return f"{ratio:.1f}{TIMES}" if ratio < 10 else f"{ratio:,.0f}{TIMES}"


def duration(seconds: object) -> str:
    """Write a measured time: 42 ms, 1.3 s, 4 min 10 s. What an island did not tell is no number."""
    if not isinstance(seconds, int | float):
        return NOTHING
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def passed(seconds: float) -> str:
    """Write how long ago something was, in one unit."""
    whole = max(0, int(seconds))
    for limit, step, unit in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if whole < limit:
            return f"{whole // step} {unit}"
    return f"{whole // 86400} d"


def plural(count: int, one: str, many: str = "") -> str:
    """Write a count with its noun."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def thousands(count: int | None) -> str:
    """Write a whole number with separators."""
    return NOTHING if count is None else f"{count:,}"


def foldable(command: str) -> str:
    """Write a long command with one option a line, so that it can be read and still be pasted."""
    return command.replace(" --", " \\\n    --")


def page_title(title: str, lost: int | None) -> str:
    """Write the title of a page with the number of lost islands, where it has one."""
    return f"({lost}) {title} \N{MIDDLE DOT} Mailboat" if lost else f"{title} \N{MIDDLE DOT} Mailboat"


def short(digest: str) -> str:
    """Shorten a hex digest; the whole stands in the copy button."""
    return digest[:12]
