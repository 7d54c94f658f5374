"""A54: the files in tests/vectors/hostile, one or two for each reason to refuse, most of them found by scripts/fuzz."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.subject import HOSTILE, Subject

FILES = sorted(HOSTILE.glob("*.bin"))


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("subject"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a54_a_hostile_file_is_refused_with_a_sentence(subject: Subject, path: Path) -> None:
    assert not subject.decode(path.read_bytes())


def test_what_the_subject_is_made_of_is_accepted(subject: Subject) -> None:
    assert len(FILES) > 50
    for number, case in enumerate(subject.cases):
        assert subject.decode(bytes([number]) + case.patch)
