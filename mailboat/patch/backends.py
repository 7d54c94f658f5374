"""The one place that chooses who computes: the kernels for this machine.

Every backend gives the same bits. Only the CPU is served now.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType


@cache
def kernels() -> ModuleType:
    """The module with the patch kernels (`find_changes`, `rice_encode`, ...) that this machine runs best."""
    return importlib.import_module("mailboat.compiled")
