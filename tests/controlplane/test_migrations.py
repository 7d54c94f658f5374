"""Migrations are complete and each application's are one line; every model has its page."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from pathlib import Path

import pytest
from django.apps import apps
from django.conf import settings
from django.core.management import call_command
from django.db import connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations import RunPython, RunSQL

PAGES = Path(settings.BASE_DIR) / "docs" / "models"
OURS = [config for config in apps.get_app_configs() if config.name.startswith("controlplane.")]
MODELS = [model for config in OURS for model in config.get_models()]


@pytest.mark.django_db
def test_no_migration_is_missing() -> None:
    said = io.StringIO()
    call_command("makemigrations", check_changes=True, dry_run=True, stdout=said)
    assert "No changes" in said.getvalue()


def test_each_application_has_one_line_of_migrations() -> None:
    loader = MigrationLoader(None, ignore_no_migrations=True)
    for label in {config.label for config in OURS} & loader.migrated_apps:
        names = sorted(name for app, name in loader.disk_migrations if app == label)
        assert len(loader.graph.leaf_nodes(label)) == 1, f"{label} has branches"
        for before, after in pairwise(names):
            parents = {parent.key for parent in loader.graph.node_map[label, after].parents}
            assert (label, before) in parents, f"{after} does not follow {before}"
        assert [name[:4] for name in names] == [f"{number:04}" for number in range(1, len(names) + 1)]


def test_every_migration_can_be_undone() -> None:
    for (label, name), migration in MigrationLoader(None, ignore_no_migrations=True).disk_migrations.items():
        if apps.get_app_config(label) in OURS:
            for operation in migration.operations:
                if isinstance(operation, RunSQL):
                    assert operation.reverse_sql is not None, f"{label} {name}"
                if isinstance(operation, RunPython):
                    assert operation.reverse_code is not None, f"{label} {name}"


@pytest.mark.django_db
def test_the_triggers_are_there() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal AND tgrelid::regclass::text ~ '^(registry|audit)_'"
        )
        found = {name for (name,) in cursor.fetchall()}
    tables = ("version", "patch", "patchpart", "anchor", "inventory", "epoch", "blob")
    assert {f"{table}_kept" for table in tables} <= found
    assert {"version_content", "patch_content", "channel_rises", "blob_unchanged", "anchor_unchanged"} <= found
    assert "entry_append_only" in found


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model._meta.label)
def test_every_model_has_a_page(model: type) -> None:
    meta = model._meta  # type: ignore[attr-defined]
    page = PAGES / f"{meta.app_label}-{meta.model_name}.md"
    assert page.exists(), f"write docs/models/{page.name}: purpose, fields that matter, life cycle, who writes it"
    text = page.read_text()
    for heading in ("## Fields", "## Life", "## Written by"):
        assert heading in text, f"{page.name} lacks {heading}"
    told = {name for row in re.findall(r"^\| (`.+?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert told and told <= {field.name for field in meta.get_fields()}, "fields that the model does not have"


def test_no_page_is_about_a_model_that_is_gone() -> None:
    names = {f"{model._meta.app_label}-{model._meta.model_name}.md" for model in MODELS}
    assert {page.name for page in PAGES.glob("*-*.md")} == names
