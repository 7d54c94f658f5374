"""What `pip install mailboat` brings: the library alone, and a command that needs neither Django nor torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Refuses what a trainer's or island's machine does not have, before anything else runs.
WITHOUT_SERVER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"django", "torch", "celery", "rest_framework", "controlplane", "workers"}:
            raise ModuleNotFoundError(f"{name} is not installed here")
sys.meta_path.insert(0, Absent())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the checkout, so that no build folder is left in it or picked up from it."""
    out, checkout = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("mailboat", "controlplane", "workers"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command = [*pip, "-w", str(out), str(checkout)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return next(out.glob("mailboat-*.whl"))


def test_the_wheel_holds_the_library_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mailboat"}
    assert "mailboat/py.typed" in names and "mailboat/cli.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_without_django_and_torch(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = WITHOUT_SERVER + (
        "sys.path.insert(0, sys.argv.pop(1))\n"
        "import mailboat.cli, mailboat.trainer.publisher, mailboat.island.sync, mailboat.image\n"
        "assert mailboat.__file__.startswith(sys.path[0])\n"
        "mailboat.cli.main()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "site"), "--help"]
    shown = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    for word in ("digest", "patch", "publish", "island"):
        assert word in shown.stdout
