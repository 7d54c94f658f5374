"""How long trouble that passes is borne: the pauses between the tries of a call, and when they end.

It must never wait for what waiting does not mend: a refusal, an address or a certificate that is wrong.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from mailboat.errors import ApiError, MailboatError, Misaddressed, Unreachable

_log = logging.getLogger(__name__)

ATTEMPTS = 6
FIRST_PAUSE = 0.2  # seconds; doubled each time, with jitter
LONGEST_PAUSE = 5.0
PATIENCE = 300.0  # seconds for which a trainer bears an outage: a restart of the control plane, or of its database
TRANSIENT = frozenset({502, 503, 504})
BUSY = 429

Sleep = Callable[[float], object]


def pause_before(attempt: int) -> float:
    """Seconds to wait before try number ``attempt`` (from 1): doubled each time, bounded, with half of it random."""
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(attempt - 1, 16))
    return longest * (0.5 + random.random() / 2)  # noqa: S311 - jitter, not a secret


class Tries:
    """The tries of one piece of work: at least ``attempts``, and as many as fit into ``patience`` seconds from the
    first failure on. With patience the first pause is logged, and 429 counts as trouble that passes.
    """

    def __init__(
        self, attempts: int, patience: float, sleep: Sleep, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._attempts = attempts
        self._patience = patience
        self._sleep = sleep
        self._clock = clock
        self._said = False
        self.gained()

    def gained(self) -> None:
        """The work went on: what failed before is forgiven."""
        self._failures = 0
        self._since: float | None = None

    def another(self, error: MailboatError, *, passing: bool = False) -> bool:
        """Waits for the next try after ``error``; False when there is none. ``passing``: it may go by itself, though it
        is no outage, so patience does not count.
        """
        now = self._clock()
        self._since = now if self._since is None else self._since
        self._failures += 1
        outage = self._outage(error)
        left = max(0.0, self._patience - (now - self._since)) if outage else 0.0
        if not (outage or passing) or (self._failures >= self._attempts and not left):
            return False
        if left and not self._said:
            self._said = True
            _log.warning("waiting for the control plane: %s", error)
        asked = error.retry_after if isinstance(error, ApiError) else 0.0
        self._sleep(max(pause_before(self._failures), min(asked, left)))
        return True

    def _outage(self, error: MailboatError) -> bool:
        if isinstance(error, ApiError):
            return error.status in TRANSIENT or (error.status == BUSY and self._patience > 0)
        return isinstance(error, Unreachable) and not isinstance(error, Misaddressed)
