"""Two hosts that are two: a leader and a member in network and mount namespaces of their own, under one engine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3

from mailboat.checkpoint.writing import write_checkpoint
from mailboat.trainer import Publisher
from tests.engines.contract_engine import ContractEngine
from tests.island.contract_server import PROJECT, RUN, ContractServer
from tests.island.fleet import image_state
from tests.sidecar.harness import Stream, Versions
from tests.waiting import PATIENCE, eventually

NAME = f"mb{os.getpid() % 100000}"
NET = 2 * (os.getpid() % 120)  # another run of the tests on this machine has others
ROOT, LEADER, TO_MEMBER, MEMBER = (f"10.213.{NET + far}.{host}" for far in (0, 1) for host in (1, 2))


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Namespaces a and b: the test's own host reaches a, a reaches b, and nobody else anybody."""
    a, b = f"{NAME}a", f"{NAME}b"
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need `ip` (iproute2) and root")
    try:
        for name in (a, b):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", f"{NAME}r", "type", "veth", "peer", "name", "up0", "netns", a)
        ip("-n", a, "link", "add", "down0", "type", "veth", "peer", "name", "up0", "netns", b)
        ip("addr", "add", f"{ROOT}/24", "dev", f"{NAME}r")
        ip("link", "set", f"{NAME}r", "up")
        for name, device, address in ((a, "up0", LEADER), (a, "down0", TO_MEMBER), (b, "up0", MEMBER)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        remove_hosts()
        pytest.skip(f"network namespaces can't be made here: {getattr(error, 'stderr', error)!r}")
    yield
    remove_hosts()


def remove_hosts() -> None:
    for name in (f"{NAME}a", f"{NAME}b"):
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", f"{NAME}r"], check=False, capture_output=True)


class TwoHosts:
    """Both processes; each sees its own folder at the same path, as two hosts do."""

    def __init__(self, folder: Path, server: ContractServer, engine: ContractEngine) -> None:
        self.folder, self.server, self.engine = folder, server, engine
        self.place = folder / "host"
        self.url = f"http://{LEADER}:8200"
        for name in ("a", "b", "host"):
            (folder / name).mkdir()
        for worker, name in zip(engine.workers, ("a", "b"), strict=True):
            worker.reload_weights = self.reading(worker.reload_weights, name)  # type: ignore[method-assign]
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def reading(self, reload: Any, name: str) -> Any:
        """A rank on a host reads that host's folder."""
        return lambda weights_path: reload(weights_path.replace(str(self.place), str(self.folder / name)))

    def start(self, name: str) -> None:
        secret = str(self.folder / "secret")
        common = ["--store", str(self.place / "store"), "--image", str(self.place / "image")]
        leader = [
            "island", "run", "--server", self.server.address, "--project", PROJECT, "--token", "once", "--engine",
            "vllm", "--engine-url", self.engine.url, "--listen", f"{LEADER}:8200", "--member", "b",
            "--members-listen", f"{TO_MEMBER}:8300", "--members-secret", secret, "--drain-seconds", "60", *common,
        ]  # fmt: skip
        member = [
            "island",
            "member",
            "--leader",
            f"http://{TO_MEMBER}:8300",
            "--name",
            "b",
            "--secret",
            secret,
            *common,
        ]
        command = [sys.executable, "-m", "mailboat.cli", *(leader if name == "a" else member)]
        own = f'mount --bind "{self.folder / name}" "{self.place}" && exec "$@"'
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                ["ip", "netns", "exec", f"{NAME}{name}", "sh", "-c", own, "sh", *command],
                stdout=log, stderr=log, env={**os.environ, "NO_PROXY": "*"},
            )  # fmt: skip

    def kill(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGKILL)
        self.running.pop(name).wait(PATIENCE)

    def link(self, state: str) -> None:
        ip("-n", f"{NAME}b", "link", "set", "up0", state)

    def digests(self) -> set[str]:
        """Of both hosts' bytes, measured from outside."""
        return {image_state(self.folder / name).digest for name in ("a", "b")}

    def member(self) -> dict[str, Any]:
        beat = self.server.beats[-1] if self.server.beats else {}
        return {"island": beat.get("phase"), **(beat.get("members") or [{}])[0]}

    def logs(self) -> str:
        return "".join((self.folder / f"{name}.log").read_text()[-1500:] for name in ("a", "b"))


@contextlib.contextmanager
def asking(url: str) -> Iterator[list[Any]]:
    """A client that asks all the time; every answer that came is kept."""
    answers, ended = [], threading.Event()

    def run() -> None:
        pool = urllib3.PoolManager(retries=False)
        while not ended.wait(0.02):
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                body = {"prompt": "hello", "max_tokens": 6}
                answer = pool.request("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE)
                answers.append((answer.status, json.loads(answer.data)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield answers
    finally:
        ended.set()
        thread.join(PATIENCE)


class Mixed(ContractEngine):
    """An engine whose ranks lie on two hosts: a token says their version, or -1 when they differ."""

    @property
    def version(self) -> int:
        versions = {worker.version for worker in self.workers}
        return versions.pop() if len(versions) == 1 else -1


def test_both_hosts_hold_the_old_version_or_both_the_new_one(hosts: None, tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    publisher: Publisher
    with (
        ContractServer(ROOT).serving() as server,
        Mixed("vllm", extension=False, ranks=2, host=ROOT).serving() as engine,
        Publisher(server.address, PROJECT, RUN, "publisher", state_dir=tmp_path / "publisher") as publisher,
    ):
        two = TwoHosts(tmp_path, server, engine)

        def publish() -> str:
            write_checkpoint(versions.source(), tmp_path / "checkpoint")
            publisher.publish_checkpoint(tmp_path / "checkpoint")
            return versions.state().digest

        def prepared() -> Stream:
            """All are ready for the next version, and a pinned request holds the commit up."""
            held = versions.number
            pinned = Stream(SimpleNamespace(url=two.url), 100_000, weight_version={"exact_version": held})  # type: ignore[arg-type]
            assert pinned.response.status == 200
            versions.next()
            publish()
            eventually(lambda: (two.member()["island"], two.member().get("phase")) == ("committing", "prepared"))
            return pinned

        def settled() -> None:
            """No manual step: both come to the newest version."""
            number, digest = versions.number, versions.state().digest
            server.wait_for(lambda: server.applied(number))
            assert two.digests() == {digest} and engine.version == number
            eventually(lambda: urllib3.request("GET", f"{two.url}/health").status == 200)

        try:
            old = publish()
            for name in ("a", "b"):
                two.start(name)
                eventually((tmp_path / "secret").exists)
            settled()
            with asking(two.url) as answers:
                for harm in ("kill the member", "cut the link", "kill the leader"):
                    old, before = versions.state().digest, versions.number
                    pinned = prepared()
                    two.kill("b") if harm == "kill the member" else None
                    two.link("down") if harm == "cut the link" else None
                    two.kill("a") if harm == "kill the leader" else pinned.close()
                    if harm != "kill the leader":  # it serves on, and nothing has been touched
                        eventually(lambda: any("not ready" in r["error"] for r in server.reports if r["error"]))
                        server.reports.clear()
                        count = len(answers)
                        eventually(lambda c=count: len(answers) > c + 3)
                        assert answers[-1][1]["weight_version_end"] == before
                    assert two.digests() == {old} and engine.version == before, harm
                    two.link("up")
                    for name in {"a", "b"} - two.running.keys():
                        two.start(name)
                    settled()
                # Killed after the decision, in the middle of the reload: it is finished, not taken back.
                engine.faults["reload_weights"] = "hang"
                versions.next()
                publish()
                eventually(lambda: two.digests() == {versions.state().digest})
                two.kill("a")
                engine.faults.clear()
                two.start("a")
                settled()
                answered = [answer for status, answer in answers if status == 200]
        finally:
            for process in two.running.values():
                process.terminate()
            for process in two.running.values():
                process.wait(PATIENCE)
            print(two.logs())
    assert versions.number == 4 and {answer["weight_version_end"] for answer in answered} >= {0, 1, 2, 3}
    for answer in answered:
        made = [int(word) for word in answer["choices"][0]["text"].split()]
        assert -1 not in made, "no token was made by two versions"
        assert answer["weight_version_start"] <= made[0] <= made[-1] <= answer["weight_version_end"]
