"""Chooses where the kernels run before Triton is imported: on the GPU if there is one, else through the interpreter.

MAILBOAT_TEST_KERNELS=interpreter|gpu decides otherwise. Triton reads TRITON_INTERPRET once, when it is imported, so the
tests of one process run in one of the two; nothing else in the tests may import Triton before.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from tests.kernels.sides import Interpreter, Side, gpu_side, reference_side


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


WANTED = os.environ.get("MAILBOAT_TEST_KERNELS") or ("gpu" if _has_gpu() else "interpreter")
if WANTED == "interpreter" and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["reference", "interpreter", "gpu"])
def side(request: Any) -> Side:
    """Who computes: the NumPy twin, Triton's interpreter on the CPU, or a GPU."""
    if request.param == "reference":
        return reference_side()
    if request.param != WANTED:
        pytest.skip(
            "there is no CUDA device" if request.param == "gpu" and not _has_gpu()
            else f"this process runs the kernels on: {WANTED}; set MAILBOAT_TEST_KERNELS={request.param}"
        )  # fmt: skip
    return Interpreter() if request.param == "interpreter" else gpu_side()
