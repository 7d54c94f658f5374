"""What the next step patch of a run is encoded for (docs/adr/encode-for-the-link.md): as small as can be, or quick to
apply where the islands' links make the bytes cheap.

Which of the two is sooner is told from what patches of either kind took in this run: where one kind has not been made
lately, the next version is, so nothing has to be guessed.
"""

from __future__ import annotations

from typing import Literal

from controlplane.fleet import measures
from controlplane.fleet.models import Island
from controlplane.registry import plan as planning
from controlplane.registry.cost import Means, is_contextual
from controlplane.registry.models import Patch, Run, Version
from controlplane.registry.plan import Edge

Encoding = Literal["size", "speed"]
SIZE: Encoding = "size"
SPEED: Encoding = "speed"
LATELY = 128  # versions after which the kind that is not used is tried once more: the share of changes drifts


def wanted(run: Run) -> Encoding:
    """For `Run.encode_for` "link" what has the run's islands at the next version soonest, in sum; else "size"."""
    if run.encode_for != Run.EncodeFor.LINK:
        return SIZE
    fleet = fleet_of(run)
    newest = Version.objects.filter(run=run, state=Version.State.READY).order_by("-number").first()
    if not fleet or newest is None or not newest.full_bytes:
        return SIZE
    ready = Patch.objects.filter(run=run, kind=Patch.Kind.STEP, to_version__state=Version.State.READY)
    lately = ready.filter(to_version__number__gt=newest.number - LATELY, changed__gt=0).exclude(codecs="")
    rows = lately.order_by("-to_version__number").values_list("bytes", "changed", "codecs")
    return choice([Edge(0, 0, 1, Patch.Kind.STEP, *row) for row in rows], fleet, newest.full_bytes)


def fleet_of(run: Run) -> list[Means]:
    """The run's islands whose links have been measured."""
    islands = Island.objects.filter(run=run, enabled=True, pending=False, link_bytes_per_second__isnull=False)
    return [measures.means_of(island, codecs=island.codecs or None) for island in islands]


def choice(steps: list[Edge], fleet: list[Means], full_bytes: int) -> Encoding:
    """By the newest patch of either kind among `steps` (newest first), as large as they would be for the changes of the
    newest one.
    """
    small = next((edge for edge in steps if is_contextual(edge.codecs)), None)
    quick = next((edge for edge in steps if not is_contextual(edge.codecs)), None)
    if small is None:
        return SIZE
    if quick is None:
        return SPEED
    now = steps[0].changed or 1
    alike = [edge._replace(bytes=edge.bytes * now // (edge.changed or 1), changed=now) for edge in (small, quick)]
    return SIZE if planning.soonest(alike, fleet, full_bytes) is alike[0] else SPEED
