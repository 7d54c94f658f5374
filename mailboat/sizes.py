"""How a number of bytes is written for people, everywhere the same."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: float) -> str:
    """A number of bytes in binary units with three significant digits: ``1.13 MiB``."""
    value, unit = float(count), _UNITS[0]
    for unit in _UNITS:
        if abs(value) < 1000 or unit == _UNITS[-1]:
            break
        value /= 1024
    if unit == _UNITS[0]:
        return f"{int(value)} B"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"
