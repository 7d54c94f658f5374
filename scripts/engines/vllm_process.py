"""One real vLLM server as a process of its own, in a group of its own so that its workers end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import urllib3

ROOT = Path(__file__).resolve().parents[2]
# Both make vLLM compute from plain weights; see scripts/engines/plain.py.
EXTENSIONS = {True: "scripts.engines.plain.PlainMailboat", False: "scripts.engines.plain.Plain"}


class Vllm:
    """A server on a folder; ``extension``: with Mailboat's worker extension (way B)."""

    def __init__(self, python: Path, folder: Path, log: Path, *, extension: bool, port: int | None = None) -> None:
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            str(python.parent / "vllm"), "serve", str(folder), "--served-model-name", "smol", "--max-model-len", "1024",
            "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--max-num-seqs", "8",
            "--enable-scale-out", "--worker-extension-cls", EXTENSIONS[extension],
        ]  # fmt: skip
        environment = dict(
            os.environ, VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", NO_PROXY="*",
            VLLM_NO_USAGE_STATS="1", PYTHONPATH=str(ROOT), PATH=f"{python.parent}:{os.environ['PATH']}",
        )  # fmt: skip
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        self._log = log

    def wait(self, seconds: float = 300) -> None:
        """Returns when it answers."""
        pool = urllib3.PoolManager(retries=False)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if pool.request("GET", f"{self.url}/health", timeout=2).status == 200:
                    return
            except urllib3.exceptions.HTTPError:
                pass
            time.sleep(0.5)
        raise RuntimeError(f"vLLM did not start; see {self._log}")

    def cached_tokens(self) -> float:
        """Prompt tokens that came from the prefix cache, as its metrics say."""
        text = urllib3.request("GET", f"{self.url}/metrics", timeout=10).data.decode()
        rows = [
            line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total")
        ]
        return sum(map(float, rows))

    def kill(self) -> None:
        """Ends it at once, with its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
