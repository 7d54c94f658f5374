"""The child of a supervised job: `python -m workers.child JOB`. Does the work and says how it goes in lines of JSON.

    {"kind": "progress", "done", "total", "unit"} · {"kind": "alive", "count"}
    {"kind": "result", "result"} · {"kind": "findings", "sentence", "result"} · {"kind": "failed", "sentence"}
    {"kind": "parked", "waiting_for", "seconds", "saved"} · {"kind": "stopped"}

It holds no lease and writes no outcome: that is its parent's. It ends by itself when the parent is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, TextIO

ALIVE_SECONDS = 5.0


class Voice:
    """Lines to the parent, whole ones also when several threads speak; and whether it still listens."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self.moves = 0
        self.over = threading.Event()

    def say(self, kind: str, **told: Any) -> None:
        """One line."""
        with self._lock:
            self._out.write(json.dumps({"kind": kind, **told}) + "\n")
            self._out.flush()

    def beat(self) -> None:
        """Says now and then whether the work moves."""
        while not self.over.wait(ALIVE_SECONDS):
            self.say("alive", count=self.moves)

    def watch(self) -> None:
        """Ends this process as soon as the parent has let go of it: nothing here is worth finishing alone."""
        sys.stdin.buffer.read()
        if not self.over.is_set():
            os._exit(1)


class Pretence:
    """Stands where the lease is in a worker of its own: the parent holds the real one."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice

    def check(self) -> None:
        """A sign that the work moves; the parent ends this process when it must not go on."""
        self._voice.moves += 1

    def progress(self, done: int, total: int | None, unit: str) -> None:
        """Passes it on."""
        self._voice.moves += 1
        self._voice.say("progress", done=done, total=total, unit=unit)


def main(job_id: str) -> None:
    """Does the work of one job."""
    import django

    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not stand between the lines
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    django.setup()
    voice = Voice(out)
    for work in (voice.beat, voice.watch):
        threading.Thread(target=work, daemon=True).start()
    try:
        _work(job_id, voice)
    finally:
        voice.over.set()
        out.flush()
    os._exit(0)  # the thread that reads stdin would hold the end up


def _work(job_id: str, voice: Voice) -> None:
    from controlplane.audit import middleware
    from controlplane.jobs.models import Job
    from mailboat.patch.backends import kernels
    from workers import runner
    from workers.presence import device
    from workers.work import Findings, Parked, Work

    middleware.begin(f"job-{job_id}")
    work = Work(Job.objects.select_related("run", "project").get(pk=job_id), Pretence(voice))
    work.log(f"Process {os.getpid()} computes on {device()}, as {type(kernels()).__name__}.")
    try:
        voice.say("result", result=runner.function_of(work.job.kind)(work))
    except Parked as parked:
        seconds = parked.until.total_seconds() if parked.still() else 0.0
        voice.say("parked", waiting_for=parked.waiting_for, seconds=seconds, saved=parked.saved)
    except Findings as found:
        voice.say("findings", sentence=str(found), result=found.result)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent has to hear of it
        voice.say("failed", sentence=runner.sentence_of(work.job, error))
    finally:
        work.close()


if __name__ == "__main__":
    main(sys.argv[1])
