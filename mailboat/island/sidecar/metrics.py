"""What the sidecar counts, for Prometheus. Gauges are read when they are asked for; nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mailboat.island.sidecar.gate import Gate
from mailboat.island.sidecar.upstreams import Upstreams

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Pause, prepare, bytes, skew, admitted and rejected of one sidecar."""

    def __init__(self, gate: Gate, upstreams: Upstreams) -> None:
        self.registry = CollectorRegistry()
        self.pause = Histogram(
            "mailboat_pause_seconds", "How long engines stood still for a commit", buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.prepare = Histogram(
            "mailboat_prepare_seconds", "How long a commit was prepared while engines served", buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.bytes = Counter("mailboat_received_bytes", "Bytes of patches and anchors received", registry=self.registry)
        self.commits = Counter("mailboat_commits", "Commits by outcome", ["outcome"], registry=self.registry)
        self.head: int | None = None  # the channel's version, for the skew
        self.last_pause = 0.0
        self._gate = gate
        self._upstreams = upstreams
        self.registry.register(_Live(self))

    def paused(self, seconds: float) -> None:
        """An engine stood still so long."""
        self.pause.observe(seconds)
        self.last_pause = seconds

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)

    def summary(self) -> dict[str, float | int | None]:
        """The few that `/server_info` shows."""
        gate = self._gate
        return {
            "pause_seconds": round(self.last_pause, 6),
            "skew_versions": self.skew,
            "admitted": gate.counts.admitted,
            "rejected": sum(gate.counts.rejected.values()),
            "queued": gate.queued,
        }

    @property
    def skew(self) -> int | None:
        """Versions between the channel's head and what is held."""
        held = self._gate.applied
        return None if held is None or self.head is None else self.head - held.version

    def live(self) -> Iterator[Metric]:
        """What is read at the moment of asking."""
        gate, members = self._gate, self._upstreams.members
        yield CounterMetricFamily("mailboat_requests_admitted", "Requests let in", value=gate.counts.admitted)
        rejected = CounterMetricFamily("mailboat_requests_rejected", "Requests refused", labels=["reason"])
        for reason, count in sorted(gate.counts.rejected.items()):
            rejected.add_metric([reason], count)
        yield rejected
        yield CounterMetricFamily(
            "mailboat_commits_given_up", "Commits given up at a limit", value=gate.counts.given_up
        )
        yield GaugeMetricFamily("mailboat_requests_active", "Requests under way", value=len(gate.active))
        yield GaugeMetricFamily("mailboat_requests_queued", "Requests that wait for a commit", value=gate.queued)
        yield GaugeMetricFamily("mailboat_engines", "Engines", value=len(members))
        yield GaugeMetricFamily(
            "mailboat_engines_fenced", "Engines without traffic", value=sum(not upstream.open for upstream in members)
        )
        if gate.applied is not None:
            yield GaugeMetricFamily("mailboat_version", "Version held", value=gate.applied.version)
        if self.skew is not None:
            yield GaugeMetricFamily("mailboat_skew_versions", "Versions behind the channel", value=self.skew)


class _Live(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.live()
