"""Reads the audit log."""

from __future__ import annotations

from django.db.models import QuerySet

from controlplane.audit.models import Entry
from controlplane.registry.models import Project


def entries(project: Project) -> QuerySet[Entry]:
    """The changes of a project, newest first."""
    return Entry.objects.filter(project=project)
