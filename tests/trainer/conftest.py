"""A server of the contract for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.island.contract_server import ContractServer


@pytest.fixture
def server() -> Iterator[ContractServer]:
    """A running contract server."""
    with ContractServer().serving() as running:
        yield running
