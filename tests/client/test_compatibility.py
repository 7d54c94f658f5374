"""Neighbouring releases of islands and control planes work together; others are told so."""

from __future__ import annotations

import pytest

from mailboat.compatibility import neighbours, release


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("0.1.0", "0.1.9", True),
        ("0.1.0", "0.2.0", True),
        ("0.3.0", "0.2.7", True),
        ("0.1.0", "0.3.0", False),
        ("0.9.1", "1.0.0", True),
        ("0.9.1", "1.1.0", False),
        ("1.4", "3.0", False),
        ("1.10.0rc1", "1.11.0", True),
        ("", "1.0.0", True),
        ("nightly", "1.0.0", True),
    ],
)
def test_n_works_with_n_minus_1(one: str, other: str, together: bool) -> None:
    assert neighbours(one, other) is together
    assert neighbours(other, one) is together


def test_a_release_is_major_and_minor() -> None:
    assert release("2.17.3.dev1+local") == (2, 17)
    assert release("2") is None
    assert release("9" * 50 + ".1") is None
