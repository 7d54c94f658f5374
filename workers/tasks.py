"""What the queues carry. Each task returns quietly whatever happened: outcomes stand in the rows."""

from __future__ import annotations

from workers.app import app


@app.task(name="mailboat.job")
def job(job_id: str) -> None:
    """Works on a job, unless it is taken, ended or not due yet."""
    from workers import runner

    runner.run(job_id)


@app.task(name="mailboat.sweep")
def sweep() -> None:
    """Puts right what time has passed over."""
    from workers.sweep import sweep as sweep_once

    sweep_once()
