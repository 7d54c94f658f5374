"""What must not be forgotten: a test for each page and template, a document for each model, pictures that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.apps import apps

from controlplane.dashboard import urls

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = sorted(path.relative_to(ROOT / "templates").as_posix() for path in (ROOT / "templates").rglob("*.html"))
TESTS = "\n".join(path.read_text() for path in sorted((ROOT / "tests" / "dashboard").glob("*.py")))
SOURCES = "\n".join(
    path.read_text()
    for folder in ("templates", "controlplane")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".html"}
)
MODELS = [model for model in apps.get_models() if model.__module__.startswith("controlplane.")]
PAGES = [pattern for pattern in urls.pages if pattern.name not in {"home", "favicon"}]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_template_is_used(template: str) -> None:
    """By a view or another template; Django itself uses those that are named after a status."""
    assert re.fullmatch(r"\d{3}\.html", template) or f'"{template}' in SOURCES


@pytest.mark.parametrize("pattern", PAGES, ids=lambda pattern: str(pattern.name))
def test_each_address_has_a_test(pattern: object) -> None:
    """Some test of the dashboard asks for it: every fixed part of the address stands in one string of a test."""
    route = str(pattern.pattern).removeprefix("projects/<slug:project>/")  # type: ignore[attr-defined]
    parts = [re.escape(part) for part in re.split(r"<[^>]+>", route)]
    assert re.search(r"[^\"'\s/]+".join(parts), TESTS), f"no test asks for {route}"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model._meta.label)
def test_each_model_has_a_page(model: object) -> None:
    label = model._meta  # type: ignore[attr-defined]
    page = ROOT / "docs" / "models" / f"{label.app_label}-{label.model_name}.md"
    assert page.exists(), f"write {page.relative_to(ROOT)}"


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.name)
def test_the_guide_points_at_what_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        file = (page.parent / target).resolve()
        assert file.exists(), f"{page.name} points at {target}"
        if file.suffix == ".png":
            assert file.stat().st_size < 200 * 1024, f"{target} is too large"


def test_pages_of_the_dashboard_have_no_inline_code() -> None:
    for path in (ROOT / "templates").rglob("*.html"):
        text = path.read_text()
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=", text), path.name
