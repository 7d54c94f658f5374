"""The words, icons and tones of every state that a page shows. A tone is never shown without its icon and word."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Badge:
    """One state for people: tone is a class of the style sheet, icon a symbol of the sprite."""

    word: str
    icon: str
    tone: str
    reason: str = ""
    turn: bool = False


HEALTH = {
    "healthy": Badge("Healthy", "check", "good"),
    "degraded": Badge("Degraded", "warn", "warn"),
    "lost": Badge("Lost", "lost", "bad"),
    "draining": Badge("Draining", "pause", "idle"),
    "disabled": Badge("Disabled", "off", "idle"),
}
SYNC = {
    "current": Badge("Current", "check", "good"),
    "behind": Badge("Behind", "behind", "warn"),
    "pinned": Badge("Pinned", "pin", "idle"),
    "ahead": Badge("Ahead", "ahead", "warn"),
    "unknown": Badge("Unknown", "ask", "idle"),
}
VERSION = {
    "committed": Badge("Committed", "clock", "idle"),
    "building": Badge("Building", "turn", "busy", turn=True),
    "validating": Badge("Validating", "turn", "busy", turn=True),
    "ready": Badge("Ready", "check", "good"),
    "retired": Badge("Retired", "off", "idle"),
    "failed": Badge("Failed", "lost", "bad"),
}
JOB = {
    "queued": Badge("Queued", "clock", "idle"),
    "running": Badge("Running", "turn", "busy", turn=True),
    "cancelling": Badge("Cancelling", "turn", "warn", turn=True),
    "succeeded": Badge("Succeeded", "check", "good"),
    "failed": Badge("Failed", "lost", "bad"),
    "cancelled": Badge("Cancelled", "off", "idle"),
}
CHALLENGE = {
    "open": Badge("Asked", "clock", "busy"),
    "answered": Badge("Checking", "turn", "busy", turn=True),
    "passed": Badge("Passed", "check", "good"),
    "failed": Badge("Failed", "lost", "bad"),
    "moved": Badge("Moved on", "ahead", "idle", "The island had gone to another version before it could answer."),
    "expired": Badge("No answer", "clock", "warn", "The island did not answer in time."),
}
TOKEN = {
    "active": Badge("Works", "check", "good"),
    "expiring": Badge("Expires soon", "clock", "warn"),
    "expired": Badge("Expired", "off", "idle"),
    "revoked": Badge("Revoked", "off", "idle"),
}
ENROLMENT = {
    "open": Badge("Open", "clock", "busy"),
    "used": Badge("Used", "check", "good"),
    "expired": Badge("Expired", "off", "idle"),
    "revoked": Badge("Revoked", "off", "idle"),
}
WORKER = {
    "online": Badge("Online", "check", "good"),
    "lost": Badge("Lost", "lost", "bad"),
    "stopped": Badge("Stopped", "off", "idle"),
}
OUTCOME = {
    "applied": Badge("Applied", "check", "good"),
    "failed": Badge("Failed", "lost", "bad"),
}


def badge(table: dict[str, Badge], state: str, reason: str = "") -> Badge:
    """The badge of a state, with a reason for this case; an unknown state is shown as it is."""
    known = table.get(state) or Badge(state.capitalize(), "ask", "idle")
    return replace(known, reason=reason) if reason else known
