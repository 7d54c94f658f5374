"""Tags and filters of the pages: icons, states, digests, times, sizes. They escape everything that they are given."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from controlplane.dashboard import charts, wording
from controlplane.dashboard.badges import Badge
from controlplane.dashboard.rows.fleet import IslandRow

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


@register.simple_tag
def icon(name: str, turn: bool = False) -> SafeString:
    """A symbol of the sprite, hidden from screen readers: the word stands beside it."""
    return format_html(
        '<svg class="icon{}" aria-hidden="true"><use href="#i-{}"/></svg>', " turn" if turn else "", name
    )


@register.simple_tag
def state(badge: Badge, pill: bool = False, brief: bool = False) -> SafeString:
    """Icon, word and, unless brief, the reason."""
    shown = _word(badge.word, badge.icon, badge.tone, badge.turn, pill)
    return shown if brief or not badge.reason else shown + format_html('<span class="reason">{}</span>', badge.reason)


@register.simple_tag
def state_in_row(badge: Badge, brief: bool = False) -> SafeString:
    """The same for long tables: the icon comes with the class."""
    shown = _word_in_row(badge.word, badge.icon, badge.tone)
    return shown if brief or not badge.reason else shown + format_html('<span class="reason">{}</span>', badge.reason)


@register.simple_tag(takes_context=True)
def island_row(context: template.Context, row: IslandRow) -> SafeString:
    """A row of the fleet's table. Put together here and not in a template: a hundred of them make a page, and this
    takes a third of the time and of the bytes.
    """
    tick = (
        format_html('<input type="checkbox" name="island" value="{0}" aria-label="Select {0}">', row.name)
        if context["operates"]
        else ""
    )
    return format_html(
        '<tr id="is-{}"><td>{}<a href="islands/{}/">{}</a><i>{}</i></td><td>{}<i>{}</i></td><td>{}</td><td>{}</td>'
        "<td>{}<b>{}</b></td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
        row.name,
        tick,
        row.id,
        row.name,
        f"{row.engine} \N{MIDDLE DOT} {row.run}" if context["several_runs"] else row.engine,
        row.provider or wording.NOTHING,
        row.region,
        state_in_row(row.health, row.is_healthy),
        state_in_row(row.sync, row.sync_is_plain),
        voyage(row.version, row.head),
        "none" if row.version is None else f"v{row.version}",
        _skew(context, row),
        _patch(row),
        wording.duration(row.pause),
        time_in_row(context, row.last_seen_at),
    )


def _skew(context: template.Context, row: IslandRow) -> str:
    if row.skew_versions is None:
        return "unknown"
    if row.skew_versions < 0:
        return f"ahead by {wording.plural(-row.skew_versions, 'version')}"
    if row.skew_versions == 0:
        return "none"
    behind = time_in_row(context, row.behind_since, "since")
    return format_html("{}<i>{}</i>", wording.plural(row.skew_versions, "version"), behind)


def _patch(row: IslandRow) -> str:
    if row.patch_bytes is None or not row.full_bytes:
        return wording.size(row.patch_bytes)
    share = wording.share(row.patch_bytes, row.full_bytes)
    return format_html("{}<i>{} of full</i>", wording.size(row.patch_bytes), share)


@lru_cache(256)
def _word(word: str, icon_name: str, tone: str, turn: bool, pill: bool) -> SafeString:
    return format_html(
        '<span class="state {}{}">{}{}</span>', tone, " pill" if pill else "", icon(icon_name, turn), word
    )


@lru_cache(256)
def _word_in_row(word: str, icon_name: str, tone: str) -> SafeString:
    return format_html('<span class="state {} i-{}">{}</span>', tone, icon_name, word)


@register.inclusion_tag("components/digest.html")
def digest(value: str, what: str = "digest", whole: bool = False) -> dict[str, Any]:
    """A shortened digest with a button that copies all of it."""
    return {"digest": value, "shown": value if whole else wording.short(value), "what": what}


@register.inclusion_tag("components/bar.html")
def bar(part: float | None, whole: float | None, label: str, tone: str = "", tall: bool = False) -> dict[str, Any]:
    """A bar filled by part of whole."""
    percent = 100 * (part or 0) / whole if whole else 0
    return {"percent": round(min(100, max(0, percent)), 2), "label": label, "tone": tone, "tall": tall}


@register.simple_tag
def voyage(held: int | None, head: int | None) -> SafeString:
    """The last versions of a channel and how far an island has come. Decoration: its words stand beside it."""
    return _voyage(charts.voyage(held, head))


@lru_cache(1024)
def _voyage(way: charts.Voyage | None) -> SafeString:
    if way is None:
        return SafeString("")
    arrived = way.here is not None and way.here + 3 >= way.length
    return format_html(
        '<svg class="strip" width="{}" height="14" aria-hidden="true">{}{}{}</svg>',
        way.length,
        "" if arrived else format_html('<path class="ahead" d="M0 7h{}"/>', way.length),
        format_html('<path d="M0 7h{}"/>', way.held) if way.held else "",
        "" if way.here is None else format_html('<path class="here" d="M{} 0v14"/>', way.here),
    )


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
def time_in_row(context: template.Context, at: datetime | None, kind: str = "ago") -> str:
    """How long ago (or `since`: how long), for long tables: the page's script adds the absolute time."""
    if at is None:
        return "never"
    now = context.get("now") or timezone.now()
    stamp, words = f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}", wording.passed((now - at).total_seconds())
    suffix = " ago" if kind == "ago" else ""
    return format_html('<time datetime="{}" data-kind="{}">{}{}</time>', stamp, kind, words, suffix)


@register.simple_tag(takes_context=True)
def since(context: template.Context, at: datetime | None) -> str:
    """How long something has lasted."""
    now = context.get("now") or timezone.now()
    return _time(at, "since", wording.passed((now - at).total_seconds()) if at else "")


@register.simple_tag
def at(moment: datetime | None) -> str:
    """The absolute time; the page's script turns it into the reader's zone."""
    return _time(moment, "absolute", "")
