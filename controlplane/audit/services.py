"""Writes the audit log. Called inside the transaction of the change, so that neither exists without the other."""

from __future__ import annotations

from typing import Any

from controlplane.audit import middleware
from controlplane.audit.models import Entry
from controlplane.registry.models import Project


def record(
    project: Project | None,
    actor: str,
    action: str,
    target: str,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> Entry:
    """One change. `action` reads like `version.commit`; `before` and `after` must never hold a secret."""
    return Entry.objects.create(
        project=project,
        actor=actor[:120],
        action=action,
        target=target[:200],
        before=before,
        after=after,
        request_id=middleware.current(),
    )
