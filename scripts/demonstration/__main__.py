"""`scripts/demo`: start the house, a trainer and its islands on this machine, and watch versions travel.

With --versions N it is a test: it exits 0 only if every island's bytes equalled the trainer's own, tensor by tensor,
for every version, and all jobs succeeded. Without, it runs until Ctrl-C. With --rl the islands make what the trainer
learns from, and no request may be lost or stamped wrongly.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from scripts.demonstration import DemoError

if TYPE_CHECKING:
    from scripts.demonstration.rl.voyage import Voyage as RlVoyage
    from scripts.demonstration.voyage import Voyage

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "demo"
LINKS_MBIT = (1000.0, 100.0, 20.0)  # emulated links of an endless demo: same rack, other region, far region


def main() -> int:
    """Parse the command line, run, and tear everything down whatever happens."""
    arguments = _parse()
    var = Path(os.environ.get("MAILBOAT_HOME") or ROOT / "var")
    for ending in (signal.SIGTERM, signal.SIGHUP):  # also when the terminal is closed
        signal.signal(ending, _interrupt)
    try:
        return _run(var, arguments)
    except KeyboardInterrupt:
        print("\nstopped" if arguments.rl else "\nstopped; the next `scripts/demo` continues from here")
        return 0 if arguments.versions is None else 130
    except DemoError as failure:
        print(f"demo: {failure}", file=sys.stderr)
        return 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="A real trainer, its islands and the dashboard on this machine."
    )
    option = parser.add_argument
    option(
        "--versions", type=_at_least_one, metavar="N",
        help="publish N patches after the anchor, check every byte, then stop (default: run until Ctrl-C)",
    )  # fmt: skip
    option("--islands", type=_at_least_one, default=3, metavar="N", help="rollout islands (default: %(default)s)")
    option("--port", type=_port, default=8600, metavar="P", help="the dashboard's port (default: %(default)s)")
    option("--json", type=Path, metavar="FILE", help="write the result there")
    option("--fresh", action="store_true", help="drop the demo's earlier state first")
    option(
        "--rl", action="store_true", help="asynchronous RL: the trainer learns from what the islands' engines answer"
    )
    option("--model", type=Path, metavar="FOLDER", help="with --rl: a causal language model (default: SmolLM2-135M)")
    option(
        "--staleness", type=int, choices=range(9), default=2, metavar="N",
        help="with --rl: how many versions old what is learnt from may be, 0 to 8 (default: %(default)s)",
    )  # fmt: skip
    return parser.parse_args()


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError("must be a port between 1 and 65535")
    return value


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(var: Path, arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    home = var / ("demo-rl" if arguments.rl else "demo")
    os.environ["MAILBOAT_HOME"] = str(home)
    os.environ["MAILBOAT_HEARTBEAT_SECONDS"] = "1"
    from controlplane.embedded.stack import Stack, StackError

    if arguments.fresh:
        _drop(home)
    model = _model(var, arguments) if arguments.rl else None
    try:
        with Stack(home, port=arguments.port) as stack:
            stack.wait_ready()
            login = _login(home)
            up = time.monotonic() - started
            print(
                f"dashboard  {stack.url}   login {login['user']} / {login['password']}   (up after {up:.1f} s)",
                flush=True,
            )
            with _voyage(stack.url, home, arguments, model) as voyage:
                result = voyage.sail(arguments.versions)
    except StackError as error:
        raise DemoError(str(error)) from error
    result["seconds"] = round(time.monotonic() - started, 1)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if _print_verdict(result) else 1


def _model(var: Path, arguments: argparse.Namespace) -> Path:
    from scripts.demonstration.rl.weights import smollm2

    folder: Path = arguments.model or smollm2(var)
    if not (folder / "config.json").is_file():
        raise DemoError(f"{folder} is no checkpoint folder: it has no config.json")
    return folder


def _voyage(url: str, home: Path, arguments: argparse.Namespace, model: Path | None) -> Voyage | RlVoyage:
    if model is not None:
        from scripts.demonstration.rl.voyage import Voyage as Rl

        return Rl(url, home, model=model, islands=arguments.islands, budget=arguments.staleness)
    from scripts.demonstration.voyage import Voyage as Plain

    links = LINKS_MBIT if arguments.versions is None else None
    return Plain(url, home, islands=arguments.islands, links=links)


def _drop(home: Path) -> None:
    from controlplane.embedded.postgres import remove

    remove(home)  # the cluster may lie outside
    shutil.rmtree(home, ignore_errors=True)


def _login(home: Path) -> dict[str, str]:
    """The demo's project and person; made on the first start, the same on the next."""
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    django.setup()
    from django.contrib.auth import get_user_model
    from django.db import connections

    from controlplane.accounts.services import set_membership
    from controlplane.registry.models import Project

    file = home / "login.json"
    login: dict[str, str]
    if file.exists():
        login = json.loads(file.read_text())
    else:
        login = {"user": "demo", "password": secrets.token_urlsafe(9)}
        file.touch(mode=0o600)
        file.write_text(json.dumps(login))
    project, _ = Project.objects.get_or_create(slug=PROJECT, defaults={"name": "Demo"})
    user, created = get_user_model().objects.get_or_create(username=login["user"])
    if created or not user.check_password(login["password"]):
        user.set_password(login["password"])
        user.save()
        set_membership(user, project, "admin", actor="scripts/demo")
    connections.close_all()
    return login


def _print_verdict(result: dict[str, Any]) -> bool:
    versions, islands, jobs = result["versions"], result["islands"], result["jobs"]
    wrong = result.get("wrong", [])
    good = (
        bool(versions)
        and all(v.get("identical", True) for v in versions)
        and all(i["identical"] for i in islands)
        and all(j["state"] == "succeeded" for j in jobs)
    )
    succeeded = sum(j["state"] == "succeeded" for j in jobs)
    verdict = "every byte identical" if good else "NOT identical or a job failed, see above"
    print(f"\n{len(versions)} versions on {len(islands)} islands, {succeeded} of {len(jobs)} jobs succeeded, ", end="")
    print("; ".join([f"{result['seconds']} s: {verdict}", *wrong]))
    return good and not wrong


if __name__ == "__main__":
    sys.exit(main())
