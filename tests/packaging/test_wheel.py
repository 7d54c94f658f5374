"""What `pip install mailboat` brings: the library alone, and a command that needs neither Django nor torch."""

from __future__ import annotations

import os
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
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("mailboat", "controlplane", "workers", "kernels"):
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
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "mailboat").rglob("*.py")}
    assert ours <= set(names)
    kernels = {f"mailboat/_kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    assert kernels <= set(names)


def test_the_wheel_asks_for_torch_and_triton_only_where_a_gpu_is_wanted(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    needs = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist: ")]
    wanted = [line for line in needs if "torch" in line or "triton" in line]
    assert len(wanted) == 2 and all("extra == 'gpu'" in line or 'extra == "gpu"' in line for line in wanted)


@pytest.mark.long
def test_the_kernels_in_the_wheel_give_the_cpus_bits(wheel: Path, tmp_path: Path) -> None:
    """Found as mailboat._kernels, run by the interpreter, far from any checkout."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import numpy as np\n"
        "from mailboat import compiled\n"
        "from mailboat.patch.backends import kernels\n"
        "old = np.arange(4096, dtype=np.uint64); new = old.copy(); new[::7] += np.uint64(1 << 40)\n"
        "found, expected = np.empty(16384, np.uint32), np.empty(16384, np.uint32)\n"
        "count = kernels().find_changes(old, new, 2, found)\n"
        "assert count == compiled.find_changes(old, new, 2, expected) == 586\n"
        "assert (found[:count] == expected[:count]).all()\n"
        "print(type(kernels()).__module__)\n"
    )
    command = [sys.executable, "-P", "-c", program, str(tmp_path / "site")]
    environment = {"PATH": os.environ["PATH"], "MAILBOAT_DEVICE": "interpreter", "TRITON_INTERPRET": "1"}
    shown = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip() == "mailboat._kernels.arrays"


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
    for word in ("digest", "patch", "quantise", "publish", "island"):
        assert word in shown.stdout
