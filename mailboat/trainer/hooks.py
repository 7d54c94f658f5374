"""What an optimizer calls after each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mailboat.trainer.served import ServedWeights


def follow(
    optimizer: Any, masters: Mapping[str, Any] | Iterable[tuple[str, Any]], *, dtype: Any = None
) -> ServedWeights:
    """Keep a served view of `masters` that is brought up to date after each `optimizer.step()`: in BF16, or in `dtype`.

    Any torch optimizer, also under DDP and FSDP2. What it costs stands in `last` after each step, and in the log.
    """
    served = ServedWeights(masters, dtype=dtype)

    def after(*_: Any) -> None:
        served.refresh()

    optimizer.register_step_post_hook(after)
    return served
