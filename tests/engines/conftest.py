"""One thread for torch: models of these sizes gain nothing by more, and on a busy machine wait for each other."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """For all tests of the engines."""
    torch.set_num_threads(1)
