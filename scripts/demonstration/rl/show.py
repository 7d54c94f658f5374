"""What a person sees in the terminal: one line per version, what happens between them, the summary.

On a terminal the last line is rewritten while things go on; in a pipe it is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from mailboat.sizes import size

BAR = 30
Said = Mapping[str, Any]
HEADING = (
    f"{'version':>7} {'reward':>7} {'ended':>6}  {'its samples by staleness':<26} {'drift':>6} "
    f"{'patch':>10} {'of full':>8} {'changed':>8} {'waited + learnt + published':>28}"
)


class Screen:
    """Prints; keeps the line that is rewritten at the bottom."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()

    def line(self, text: str) -> None:
        """A line that stays."""
        print(("\r\x1b[K" if self._live else "") + text, flush=True)

    def status(self, said: Said, islands: Mapping[str, int | None]) -> None:
        """The trainer's progress, and which version each island has proven."""
        if self._live:
            held = "  ".join(f"{name} {'-' if held is None else f'v{held}'}" for name, held in islands.items())
            answers = f"{said['waiting']} groups wait, {said['running']} under way"
            print(f"\r\x1b[K        {said['doing']}; {answers}; {held}"[:110], end="", flush=True)

    def version(self, said: Said) -> None:
        """A version and the batch that it was learnt from."""
        if said["number"] == 0:
            self.line(HEADING)
            self.line(f"{0:>7} {'':>7} {'':>6}  {'the anchor':<26} {'':>6} {size(said['full_bytes']):>10}")
            return
        staleness = "  ".join(f"{age}: {count}" for age, count in said["staleness"].items())
        drift = max(said["drift"].values(), default=0.0)
        seconds = said["seconds"]
        took = f"{seconds['waiting']:.1f} + {seconds['learning']:.1f} + {seconds['publishing']:.1f} s"
        self.line(
            f"{said['number']:>7} {said['reward']:>7.3f} {said['ended']:>6.0%}  {staleness:<26} {drift:>6.3f} "
            f"{size(said['patch_bytes']):>10} {said['patch_bytes'] / said['full_bytes']:>8.2%} "
            f"{said['changed'] / said['elements']:>8.2%} {took:>28}"
        )

    def summary(self, result: Said) -> None:
        """What came of it."""
        counts, after, first = result["counts"], result["after"], result["steps"][0]
        last = result["versions"][-1]["number"]
        rewards = "  ".join(f"{step['reward']:.3f}" for step in result["steps"])
        lines = [
            "",
            f"reward     {rewards}   per step",
            f"           {first['reward']:.3f} before, {after['reward']:.3f} after: what version 0 answered, what "
            f"version {last} answers; ended by themselves {first['ended']:.0%}, {after['ended']:.0%}",
            f"           for example: {after['example']!r}",
            *_histogram("staleness", counts["by_staleness"]),
            f"           budget {result['budget']}; {counts['stale']} samples were dropped as too old, "
            f"{counts['spanning']} of all answers span a commit",
            *_samples(counts),
            f"requests   {sum(counts['answered'].values())} answered "
            f"({', '.join(f'{name} {count}' for name, count in sorted(counts['answered'].items()))}), "
            f"{sum(counts['refused'].values())} refused{_by_status(counts['refused'])}, {counts['unreachable']} found "
            f"nobody; {counts['lost']} lost, {counts['misstamped']} stamped wrongly",
            *(
                f"{'islands' if place == 0 else '':<11}{it['name']:<12} v{it['version']} {str(it['digest'])[:12]} "
                f"{'identical' if it['identical'] else 'NOT IDENTICAL'}{'' if it['here'] else ', left'}"
                for place, it in enumerate(result["islands"])
            ),
            f"engines    answer alike, token by token and bit by bit: {'yes' if result['alike'] else 'NO'}",
        ]
        for line in lines:
            self.line(line)


def _histogram(title: str, counts: Mapping[str, int], prefix: str = "") -> list[str]:
    """A line per key, with a bar."""
    most = max(counts.values(), default=1)
    lines: list[str] = []
    for key in _in_order(counts):
        bar = "█" * max(1, round(BAR * counts[key] / most))
        lines.append(f"{'' if lines else title:<11}{prefix + key:>3} {counts[key]:>5}  {bar:<{BAR}}")
    return lines


def _samples(counts: Said) -> list[str]:
    """Of which versions the samples were, and what those earned."""
    used, earned = counts["by_version"], counts["earned"]
    lines = zip(_histogram("samples of", used, "v"), _in_order(used), strict=True)
    return [f"{line}  reward {earned[version] / used[version]:.3f}" for line, version in lines]


def _in_order(counts: Mapping[str, int]) -> list[str]:
    return sorted(counts, key=int)


def _by_status(refused: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{status}: {count}' for status, count in sorted(refused.items()))})" if refused else ""
