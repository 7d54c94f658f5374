"""What other applications may listen to. Sent inside the transaction that ends a job."""

from __future__ import annotations

from django.dispatch import Signal

job_ended = Signal()  # job: the ended row
