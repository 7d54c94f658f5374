"""What `mailboat doctor` looks at: everything that keeps an island or a trainer from working, found before it does.

Every finding is one line with what to do. It must never write anything but to folders that it is told of, and never
print a token.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from mailboat import __version__
from mailboat.client import Api
from mailboat.compatibility import neighbours
from mailboat.errors import ApiError, MailboatError, NotFound, Unreachable
from mailboat.island.heads import CLOCK_TOLERANCE
from mailboat.sizes import size

OK, WARN, FAIL = "ok", "warn", "fail"
SPARE_BYTES = 1 << 30
SKEW_WARN = 60.0  # seconds; the fleet page shows it from there on
SLOW_COMPILE = 5.0
EXPIRES_SOON = 14 * 86400
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - tmpfs by that name on Linux
FEATURES = ("avx2", "avx512f", "sha_ni", "asimd", "sha2")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `level` is ok, warn or fail."""

    level: str
    what: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Patient:
    """What is looked at. Without `api` the machine alone is."""

    api: Api | None
    run: str | None
    store: Path | None


def examine(patient: Patient) -> Iterator[Finding]:
    """The findings, one by one, as they are made."""
    needed = None
    if patient.api is not None:
        reached = False
        for finding in _server(patient.api):
            reached |= finding.what == "server" and finding.level != FAIL
            yield finding
        if reached:
            yield from _token(patient.api)
            needed = _model_bytes(patient)
    yield from _disk(patient.store, needed)
    yield _memory(needed)
    yield _processor()
    yield _compiled()


# The server


def _server(api: Api) -> Iterator[Finding]:
    asked = time.time()
    began = time.perf_counter()
    try:
        answer = api.probe("health/ready")
    except Unreachable as error:
        yield Finding(FAIL, "server", str(error))
        return
    seconds = time.perf_counter() - began
    if answer.status == 200:
        yield Finding(OK, "server", f"{api.server} answers in {seconds * 1000:.0f} ms and is ready.")
    else:
        yield Finding(
            WARN, "server", f"{api.server} answers, but is not ready (status {answer.status}); ask its operator."
        )
    yield _clock(answer.headers.get("Date", ""), asked + seconds / 2, seconds)


def _clock(date: str, here: float, seconds: float) -> Finding:
    try:
        there = parsedate_to_datetime(date).timestamp() + 0.5  # dates are whole seconds
    except ValueError:
        return Finding(WARN, "clock", "The server told no time, so the clocks could not be compared.")
    skew, unsure = here - there, seconds / 2 + 0.5
    if abs(skew) <= unsure + 1.0:
        return Finding(OK, "clock", "This machine and the server agree within a second or so.")
    word = f"This machine is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the server"
    if abs(skew) > CLOCK_TOLERANCE:
        return Finding(FAIL, "clock", f"{word}, so islands here refuse heads; set the clock (NTP).")
    level = WARN if abs(skew) > SKEW_WARN else OK
    return Finding(level, "clock", f"{word}; up to {CLOCK_TOLERANCE} s are tolerated.")


def _token(api: Api) -> Iterator[Finding]:
    if not api.token:
        yield Finding(WARN, "token", "No token was given, so nothing that needs one was looked at (MAILBOAT_TOKEN).")
        return
    try:
        caller = api.caller()
    except NotFound:
        yield Finding(FAIL, "token", f"The token does not open project {api.project}, or the server is too old to say.")
        return
    except (ApiError, Unreachable) as error:
        yield Finding(FAIL, "token", str(error))
        return
    bound = "".join(f", for {word} {caller[word]} alone" for word in ("run", "island") if caller.get(word))
    expiry, level = _expiry(caller.get("expires_at"))
    yield Finding(level, "token", f"The token has the role {caller.get('role')} in {api.project}{bound}{expiry}.")
    server = str(caller.get("server_version", ""))
    if neighbours(__version__, server):
        yield Finding(OK, "release", f"This is {__version__}, the server is {server}: they work together.")
    else:
        yield Finding(
            FAIL, "release", f"This is {__version__}, the server is {server}: install a neighbour of that release."
        )


def _expiry(text: Any) -> tuple[str, str]:
    if not isinstance(text, str):
        return "", OK
    left = (datetime.fromisoformat(text) - datetime.now(UTC)).total_seconds()
    return f" and expires in {left / 86400:.0f} days", WARN if left < EXPIRES_SOON else OK


def _model_bytes(patient: Patient) -> int | None:
    """The size of the run's newest version whole, when that can be known."""
    if patient.api is None or patient.run is None or not patient.api.token:
        return None
    try:
        newest = patient.api.newest_version(patient.run)
    except MailboatError:
        return None
    return None if newest is None else newest.full_bytes


# The machine


def _disk(store: Path | None, needed: int | None) -> Iterator[Finding]:
    if store is None:
        return
    place = next(folder for folder in (store.absolute(), *store.absolute().parents) if folder.is_dir())
    if not os.access(place, os.W_OK | os.X_OK):
        yield Finding(FAIL, "disk", f"{place} can't be written by this account; choose another --store.")
        return
    free = shutil.disk_usage(place).free
    wanted = SPARE_BYTES if needed is None else 2 * needed + SPARE_BYTES  # base, the next base, and a log
    sentence = f"{size(free)} are free for {store}; {size(wanted)} are recommended"
    yield Finding(OK if free >= wanted else WARN, "disk", f"{sentence}.")


def _memory(needed: int | None) -> Finding:
    if not SHARED_MEMORY.is_dir():
        return Finding(WARN, "memory", "There is no /dev/shm: name a folder for the image with --image.")
    free = shutil.disk_usage(SHARED_MEMORY).free
    if needed is not None and free < needed:
        lack = f"{SHARED_MEMORY} has {size(free)} free, the image needs {size(needed)}"
        return Finding(WARN, "memory", f"{lack}: enlarge it or use --image FOLDER.")
    return Finding(OK, "memory", f"{SHARED_MEMORY} has {size(free)} free for the image.")


def _processor() -> Finding:
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.partition(":")[2].split())
                break
    except OSError:
        pass
    known = [name for name in FEATURES if name in flags]
    cores = len(os.sched_getaffinity(0))
    return Finding(OK, "processor", f"{cores} cores; {', '.join(known) or 'no feature that matters'}.")


def _compiled(clock: Callable[[], float] = time.perf_counter) -> Finding:
    began = clock()
    try:
        import mailboat.compiled  # noqa: F401 - what counts is whether it loads, and how fast
    except ImportError as error:
        return Finding(FAIL, "compiled", f"The compiled code can't be loaded ({error}); install mailboat again.")
    seconds = clock() - began
    if seconds > SLOW_COMPILE:
        return Finding(
            WARN, "compiled",
            f"The compiled code took {seconds:.0f} s to load: Numba's cache can't be kept. Make the package's folder "
            "writable or set NUMBA_CACHE_DIR.",
        )  # fmt: skip
    return Finding(OK, "compiled", f"The compiled code loads in {seconds:.1f} s.")
