"""Turns successive reports of one engine's raw totals into counter increments and gauges."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from outrider.core.dispatch import DraftLinkStatus, EngineStatus
from outrider.core.speculation import SpeculationMode, SpeculationReason
from outrider.telemetry import metrics
from outrider.telemetry.metrics import ENGINE_LABELS, Metric
from outrider.telemetry.sink import MetricSink

__all__ = ["EngineMetrics"]


_REPORTS_AFTER_LEAVING = 300
"""About five minutes: no scraper misses it."""


@dataclass(frozen=True, slots=True)
class _Series:
    """One counter under one value of its own label, if it has one."""

    metric: Metric
    label: tuple[tuple[str, str], ...] = ()

    @property
    def of_engine(self) -> bool:
        """Whether the total lives as long as the engine; a draft link may be replaced before."""
        return self.metric is not metrics.DRAFT_LOSSES


@dataclass(slots=True)
class _Baseline:
    """What was published of the engine that runs now."""

    life: tuple[str, int] | None = None
    totals: dict[_Series, float] = field(default_factory=dict)


class EngineMetrics:
    """Publishes one engine, or the engines that follow one another under one name.

    Called about once a second, off the engine's thread. Not thread-safe.
    """

    def __init__(self, sink: MetricSink, labels: Mapping[str, str]) -> None:
        """`labels`: a value for each of `ENGINE_LABELS`. Raises `ValueError` otherwise."""
        if labels.keys() != set(ENGINE_LABELS):
            raise ValueError(f"labels: {sorted(labels)} are not {sorted(ENGINE_LABELS)}")
        self._sink = sink
        self._labels = dict(labels)
        self._baseline = _Baseline()
        self._drafts: dict[str, int] = {}
        """Reports since a draft was last linked, by its address."""
        self._speculated: bool | None = None

    def publish(
        self,
        status: EngineStatus,
        *,
        engine_epoch: int = 0,
        hops_s: Iterable[float] = (),
    ) -> None:
        """Publish what has changed since the last call; `hops_s`: the hops to the draft that were measured since.

        Another engine id or epoch is a new engine, whose totals count from 0. So does a total that
        went down: an engine can be replaced by one that looks the same.
        """
        totals = dict(_totals(status))
        life = (status.engine_id, engine_epoch)
        before = self._baseline.totals
        restarted = any(value < before.get(series, 0.0) for series, value in totals.items() if series.of_engine)
        if life != self._baseline.life or restarted:
            self._baseline = _Baseline(life=life)
        for series, value in totals.items():
            published = self._baseline.totals.get(series, 0.0)
            # Only the links' total can go down here: a link was replaced and counts from 0.
            increment = value - published if value >= published else value
            self._sink.add(series.metric, increment, {**self._labels, **dict(series.label)})
            self._baseline.totals[series] = value
        for hop_s in hops_s:
            self._sink.observe(metrics.DRAFT_HOP, hop_s, self._labels)
        self._set_gauges(status)

    def _set_gauges(self, status: EngineStatus) -> None:
        self._set(metrics.RUNNING, status.running)
        self._set(metrics.WAITING, status.waiting)
        self._set(metrics.KV_USAGE, status.kv_usage)
        self._count_switch(status.mode is not SpeculationMode.OFF)
        if status.estimated_speedup is not None:
            self._set(metrics.ESTIMATED_SPEEDUP, status.estimated_speedup)
        for mode in SpeculationMode:
            self._set(metrics.SPECULATION_MODE, mode is status.mode, mode=mode.value)
        for reason in SpeculationReason:
            self._set(metrics.SPECULATION_REASON, reason is status.reason, reason=reason.value)
        links = {link.address: link for link in status.draft_links if link.address}
        # A draft that left says so for a while: its series would end as "connected". Then it is forgotten,
        # and its series with it, since every draft that comes has an address of its own.
        self._drafts = {address: age + 1 for address, age in self._drafts.items() if age < _REPORTS_AFTER_LEAVING}
        self._drafts |= dict.fromkeys(links, 0)
        for address in self._drafts:
            link = links.get(address, DraftLinkStatus(address=address, connected=False))
            self._set(metrics.DRAFT_CONNECTED, link.connected, draft=address)
            self._set(metrics.DRAFT_ROUND_TRIP, link.round_trip_s, draft=address)
            self._set(metrics.DRAFT_OPEN_SEQUENCES, link.open_sequences, draft=address)

    def _count_switch(self, speculates: bool) -> None:
        switched = self._speculated is not None and speculates is not self._speculated
        self._speculated = speculates
        self._sink.add(metrics.SPECULATION_SWITCHES, int(switched), self._labels)

    def _set(self, metric: Metric, value: float, **labels: str) -> None:
        self._sink.set(metric, float(value), {**self._labels, **labels})


def _totals(status: EngineStatus) -> Iterator[tuple[_Series, float]]:
    """The raw totals of one report, by series."""
    totals = status.totals
    # A round that verified a block has verified its first position.
    drafts = totals.verified_per_position[0] if totals.verified_per_position else 0
    plain = (
        (metrics.NUM_DRAFTS, drafts),
        (metrics.NUM_DRAFT_TOKENS, totals.drafted),
        (metrics.NUM_VERIFIED_TOKENS, totals.verified),
        (metrics.NUM_ACCEPTED_TOKENS, totals.accepted),
        (metrics.NUM_COMMITTED_TOKENS, totals.committed),
        (metrics.NUM_ROUNDS, totals.rounds),
        (metrics.NUM_CACHED_LOOKUPS, totals.cached_lookups),
        (metrics.NUM_CACHED_HITS, totals.cached_hits),
        (metrics.NUM_LATE, totals.late),
        (metrics.NUM_STALE, totals.stale),
        (metrics.NUM_INVALID, totals.invalid),
        (metrics.NUM_LATE_LAWS, totals.late_laws),
        (metrics.NUM_MESSAGES_SENT, totals.draft_messages_sent),
        (metrics.NUM_MESSAGES_RECEIVED, totals.draft_messages_received),
        (metrics.NUM_STEPS, totals.steps),
        (metrics.NUM_SPECULATIVE_STEPS, totals.speculative_steps),
        (metrics.FORWARD_ROWS, totals.forward_rows),
        (metrics.PREEMPTIONS, totals.preemptions),
        (metrics.PREFIX_CACHE_QUERIED, totals.prefix_cache_queried_tokens),
        (metrics.PREFIX_CACHE_HITS, totals.prefix_cache_hit_tokens),
        (metrics.SEQUENCES_FINISHED, totals.finished_sequences),
        (metrics.SEQUENCES_FAILED, totals.failed_sequences),
    )
    for metric, value in plain:
        yield _Series(metric), value
    for metric, values in (
        (metrics.NUM_ACCEPTED_PER_POS, totals.accepted_per_position),
        (metrics.NUM_VERIFIED_PER_POS, totals.verified_per_position),
    ):
        for position, value in enumerate(values):
            yield _Series(metric, (("position", str(position)),)), value
    for phase, seconds in totals.step_seconds:
        yield _Series(metrics.STEP_SECONDS, (("phase", phase),)), seconds
    # One number for all links: whose it was when there is none any more, nobody can say.
    yield _Series(metrics.DRAFT_LOSSES), sum(link.losses for link in status.draft_links)
