"""What a starting process imports decides how long everybody waits for it: heavy packages come when they are used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
HEAVY = ("numba", "scipy", "torch", "transformers", "obstore", "playwright", "boto3", "triton")
WEB = "import controlplane.asgi; from django.urls import get_resolver; get_resolver().url_patterns"
WORKER = "import celery.apps.worker, celery.apps.beat, workers.app; workers.app.app.loader.import_default_modules()"


@pytest.mark.parametrize(
    "start", [WEB, WORKER, "import mailboat.cli, mailboat.client, mailboat.digest, mailboat.patch"]
)
def test_heavy_packages_are_not_imported_at_the_start(start: str, tmp_path: Path) -> None:
    environment = {**os.environ, "MAILBOAT_HOME": str(tmp_path), "DATABASE_URL": "postgresql://nobody@127.0.0.1/none"}
    ask = f"import sys; {start}; print(*sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", ask], cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True
    )
    assert not {name.partition(".")[0] for name in said.stdout.split()} & set(HEAVY)
