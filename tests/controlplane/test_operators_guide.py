"""The operator's guide names every setting and every metric, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
GUIDE = (CHECKOUT / "docs/operators.md").read_text()
NAME = r"(?:MAILBOAT_[A-Z_]+|DATABASE_URL)"


def section(title: str) -> str:
    return GUIDE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def sources() -> str:
    files = [*(CHECKOUT / "controlplane").rglob("*.py"), *(CHECKOUT / "workers").rglob("*.py")]
    return "\n".join(path.read_text() for path in files)


def test_the_table_of_settings_is_the_environment_that_is_read() -> None:
    read = set(re.findall(rf'\b(?:text|flag|integer|secret|names)\(\s*"({NAME})"', sources()))
    rows = re.findall(rf"^\| `({NAME})`", section("Settings"), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == read


def test_secrets_may_come_from_files_and_the_table_says_so() -> None:
    secrets = set(re.findall(rf'\bsecret\(\s*"({NAME})"', sources()))
    assert set(re.findall(rf"^\| `({NAME})` \(or file\)", section("Settings"), re.MULTILINE)) == secrets


def test_the_table_of_metrics_is_what_is_served() -> None:
    served = set(re.findall(r'"(mailboat_[a-z_]+)"', (CHECKOUT / "controlplane/api/metrics.py").read_text()))
    assert set(re.findall(r"`(mailboat_[a-z_]+)`", section("Monitoring"))) == served
    asked = set(re.findall(r"mailboat_[a-z_]+", (CHECKOUT / "docs/deploy/alerts.yaml").read_text()))
    assert asked <= served


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#][^)]*)\)", GUIDE):
        assert (CHECKOUT / "docs" / target).exists(), target
