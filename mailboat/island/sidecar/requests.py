"""What the sidecar reads from a request and changes in it before an engine sees it.

The constraint is taken out of the body, and in `in_place` mode the prefix cache's key is made of the version and the
client's own key, so that no request meets keys of older weights. Everything else stays, byte for byte. A body that
can't be read here is refused, whatever the engine could make of it: unread, its constraint would be ignored and its key
would name no version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mailboat.island.sidecar.splice import Thing, decoded, edited, parse_object
from mailboat.island.sidecar.types import Applied, BadConstraint, Constraint

OURS = frozenset({"weight_version", "run_id"})


@dataclass(frozen=True, slots=True)
class JsonRequest:
    """A request with a body that is a JSON object, and its constraint."""

    constraint: Constraint
    raw: bytes
    text: str
    thing: Thing

    @classmethod
    def versioned(cls, raw: bytes, headers: Constraint) -> JsonRequest:
        """A body whose fields may constrain. Raises BadConstraint, also for a body that is no JSON object in UTF-8, and
        for one whose answer would be made after this request ended, when no commit waits for it or cuts it.
        """
        text, thing = _read(raw)
        names = [member.key for member in thing.members if member.key in OURS]
        for name in names:
            if names.count(name) > 1:
                raise BadConstraint(f"{name} is given twice; send it once.")
        if any(member.key == "background" and member.value not in (None, False) for member in thing.members):
            raise BadConstraint("background is not known here: nobody could say which versions made its answer.")
        body = Constraint.parse(thing.get("weight_version"), thing.get("run_id"))
        return cls(body.joined(headers), raw, text, thing)

    @classmethod
    def unversioned(cls, raw: bytes, headers: Constraint) -> JsonRequest:
        """A body on a route whose answers can't say which version ended them: there headers alone constrain. Raises
        BadConstraint where the body asks for a version or a run, or can't be read.
        """
        text, thing = _read(raw)
        for member in thing.members:
            if member.key in OURS:
                raise BadConstraint(
                    f"{member.key} is not known on this route; send the header Mailboat-Min-Version or "
                    "Mailboat-Exact-Version instead."
                )
        return cls(headers, raw, text, thing)

    def for_engine(self, applied: Applied, cache_key: str | None) -> bytes:
        """The body that the engine gets. ``cache_key``: the member that namespaces its prefix cache, if it is used."""
        put = {} if cache_key is None else {cache_key: _salted(applied, cache_key, self.thing.get(cache_key))}
        if not put and not any(member.key in OURS for member in self.thing.members):
            return self.raw
        return edited(self.text, self.thing, cut=OURS, put=put).encode()


def _read(raw: bytes) -> tuple[str, Thing]:
    text = decoded(raw)
    thing = None if text is None else parse_object(text)
    if text is None or thing is None:
        raise BadConstraint(
            "The body must be one JSON object in UTF-8, without a byte order mark, and without nesting or numbers "
            "beyond Python's limits."
        )
    return text, thing


def _salted(applied: Applied, cache_key: str, own: Any) -> Any:
    """The key of the version and the client's own together; a batch has one key for each prompt.

    Raises BadConstraint for what can't be a key: builds differ in what they refuse, and what one takes for no key at
    all would be answered from older weights. An empty one is such, also to vLLM on routes that don't look at it.
    """
    keys = own if isinstance(own, list) else [own]
    if not all(key is None or isinstance(key, str) for key in keys):
        raise BadConstraint(f"{cache_key} must be a string, or a list with a string for each prompt.")
    if isinstance(own, list) and own:
        return [applied.salt(key or None) for key in own]
    return applied.salt(own or None)
