"""The patch file: what turns one state of the served weights into another, bit for bit.

Only this package knows the format. It never does floating-point arithmetic and never runs anything that a patch
contains.
"""

from __future__ import annotations

from mailboat.patch.apply import apply_patch
from mailboat.patch.build import BuiltPatch, PartSpec, build_patch
from mailboat.patch.container import PatchFile
from mailboat.patch.derive import merge_patches, reverse_patch
from mailboat.patch.inspection import inspect

__all__ = [
    "BuiltPatch",
    "PartSpec",
    "PatchFile",
    "apply_patch",
    "build_patch",
    "inspect",
    "merge_patches",
    "reverse_patch",
]
