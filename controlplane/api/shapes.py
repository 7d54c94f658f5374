"""What a body of the API is made of: objects of known keys, and values of the type that they should be.

DRF's own fields take 5 for a text and "yes" for true; a caller who sends such has made a mistake that would show up
much later. Only shapes live here: which bodies there are stands in the modules of serialisers.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from rest_framework import serializers

BIG = (1 << 63) - 1
NAMED = 8  # unknown names that a refusal lists
LONGEST_NAME = 80


def no_such(names: Iterable[str], kind: str, known: Iterable[str], otherwise: str) -> dict[str, str]:
    """What is said of names that stand for nothing; `otherwise` where nothing is known at all."""
    listed = ", ".join(known)
    said = f"There is no such {kind} here; {f'there are {listed}' if listed else otherwise}."
    return {name[:LONGEST_NAME]: said for name in sorted(names)[:NAMED]}


class Body(serializers.Serializer):
    """An object whose every key is known.

    In the context `newer` is true when the caller is a later release of ours (`query.from_newer`): what it says beyond
    what this one knows is passed over.
    """

    def to_internal_value(self, data: Any) -> Any:
        """Refuses keys that stand for nothing, by name."""
        unknown = set(map(str, data.keys() - self.fields.keys())) if isinstance(data, dict) else set()
        if unknown and not self.context.get("newer", False):
            raise serializers.ValidationError(no_such(unknown, "key", self.fields, "this call takes no body"))
        return super().to_internal_value(data)


class Nothing(Body):
    """Calls whose address says everything: no body, or an empty object."""


class Whole(serializers.IntegerField):
    """A number that is a JSON integer, not a text or a fraction that looks like one, and fits a database column."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"min_value": 0, "max_value": BIG, **options})

    def to_internal_value(self, data: Any) -> int:
        """Refuses everything but integers."""
        if type(data) is not int:
            self.fail("invalid")
        return int(super().to_internal_value(data))


class Real(serializers.FloatField):
    """A JSON number."""

    def to_internal_value(self, data: Any) -> float:
        """Refuses everything but numbers, and those that no float can hold."""
        if type(data) not in {int, float} or abs(data) > 1e300:
            self.fail("invalid")
        return float(super().to_internal_value(data))


class Flag(serializers.BooleanField):
    """true or false."""

    def to_internal_value(self, data: Any) -> bool:
        """Refuses what only means it."""
        if type(data) is not bool:
            self.fail("invalid", input=str(data)[:LONGEST_NAME])
        return data


class _Text:
    """A JSON string, not something that could be written as one."""

    def to_internal_value(self, data: Any) -> str:
        """Refuses everything but texts."""
        if type(data) is not str:
            self.fail("invalid")  # type: ignore[attr-defined]
        return str(super().to_internal_value(data))  # type: ignore[misc]


class Text(_Text, serializers.CharField):
    """Any text."""


class Slug(_Text, serializers.SlugField):
    """Letters, digits, hyphens and underscores."""


class Pattern(_Text, serializers.RegexField):
    """A text of a given form."""


class Choice(serializers.ChoiceField):
    """One of some words."""

    default_error_messages = {"invalid_choice": '"{input}" is none of {choices}.'}

    def to_internal_value(self, data: Any) -> Any:
        """Refuses everything but texts; the words are compared as they are."""
        if not isinstance(data, str) or data not in self.choices:
            self.fail("invalid_choice", input=str(data)[:LONGEST_NAME], choices=", ".join(map(str, self.choices)))
        return data


class Identifier(serializers.UUIDField):
    """A UUID in its usual form."""

    def to_internal_value(self, data: Any) -> uuid.UUID:
        """Refuses numbers."""
        if not isinstance(data, str):
            self.fail("invalid", value=str(data)[:LONGEST_NAME])
        return uuid.UUID(str(super().to_internal_value(data)))
