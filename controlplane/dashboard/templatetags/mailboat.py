"""Tags and filters of the pages: icons, states, digests, times, sizes. They escape everything that they are given."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from controlplane.dashboard import charts, wording
from controlplane.dashboard.badges import Badge

register = template.Library()

register.filter("size", wording.size)
register.filter("duration", wording.duration)
register.filter("foldable", wording.foldable)
register.filter("counting", wording.page_title)
register.filter("thousands", wording.thousands)


@register.simple_tag
def share(part: float | None, whole: float | None) -> str:
    """Part of whole in per cent."""
    return wording.share(part, whole)


@register.simple_tag
def smaller(part: float | None, whole: float | None) -> str:
    """How often part fits into whole."""
    return wording.times_smaller(part, whole)


@register.simple_tag
def count(number: int, one: str, many: str = "") -> str:
    """A count with its noun."""
    return wording.plural(number, one, many)


@register.inclusion_tag("components/icon.html")
def icon(name: str, turn: bool = False) -> dict[str, Any]:
    """A symbol of the sprite, hidden from screen readers: the word stands beside it."""
    return {"name": name, "turn": turn}


@register.inclusion_tag("components/badge.html")
def state(badge: Badge, pill: bool = False, brief: bool = False) -> dict[str, Any]:
    """Icon, word and, unless brief, the reason."""
    return {"badge": badge, "pill": pill, "brief": brief}


@register.inclusion_tag("components/digest.html")
def digest(value: str, what: str = "digest", whole: bool = False) -> dict[str, Any]:
    """A shortened digest with a button that copies all of it."""
    return {"digest": value, "shown": value if whole else wording.short(value), "what": what}


@register.inclusion_tag("components/bar.html")
def bar(part: float | None, whole: float | None, label: str, tone: str = "", tall: bool = False) -> dict[str, Any]:
    """A bar filled by part of whole."""
    percent = 100 * (part or 0) / whole if whole else 0
    return {"percent": round(min(100, max(0, percent)), 2), "label": label, "tone": tone, "tall": tall}


@register.inclusion_tag("components/voyage.html")
def voyage(held: int | None, head: int | None) -> dict[str, Any]:
    """The last versions of a channel and how far an island has come."""
    cells = charts.voyage(held, head)
    place = f"At version {held}" if held is not None else "No version yet"
    return {"cells": cells, "width": max(6, len(cells) * 8 - 2), "label": f"{place}; the head is version {head}"}


def _time(at: datetime | None, kind: str, text: str) -> SafeString | str:
    if at is None:
        return "never"
    stamp = at.astimezone(timezone.get_default_timezone())
    title = f"{stamp:%-d %b %Y, %H:%M:%S} UTC"
    return format_html(
        '<time datetime="{}" data-kind="{}" title="{}">{}</time>', stamp.isoformat(), kind, title, text or title
    )


@register.simple_tag(takes_context=True)
def ago(context: template.Context, at: datetime | None) -> str:
    """How long ago, with the absolute time as its title; the page's script keeps it going."""
    now = context.get("now") or timezone.now()
    return _time(at, "ago", f"{wording.passed((now - at).total_seconds())} ago" if at else "")


@register.simple_tag(takes_context=True)
def since(context: template.Context, at: datetime | None) -> str:
    """How long something has lasted."""
    now = context.get("now") or timezone.now()
    return _time(at, "since", wording.passed((now - at).total_seconds()) if at else "")


@register.simple_tag
def at(moment: datetime | None) -> str:
    """The absolute time; the page's script turns it into the reader's zone."""
    return _time(moment, "absolute", "")
