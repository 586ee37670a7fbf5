"""The gateway's metrics, in a registry of its own."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvherd.core.fleet.breaker import BreakerState
from kvherd.core.fleet.fanout import FanoutReport, Outcome
from kvherd.core.fleet.keyring import Keyring
from kvherd.core.fleet.roster import Member, Roster, WorkerState
from kvherd.core.ids import WorkerId
from kvherd.ports.tls import ServerTls, WorkerTls
from kvherd.services.gateway.relay.handshake import REASONS
from kvherd.services.gateway.settings import HealMode
from kvherd.services.gateway.tallies import TTFT_BUCKETS_S, Tallies
from kvherd.services.tls.handshakes import Handshakes
from kvherd.wire.fleet_json import KvView

MOST_GONE: Final = 64
"""Of so many workers that left, what was counted is kept. Where addresses come and go there would be ever more of them,
and to tell of a thousand takes half a second, in which nobody is served."""


class Admitting(Protocol):
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def held(self) -> int: ...


class _Alone(Collector):
    """One metric that was collected."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


class _Tallied(Collector):
    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._tallies.collect()


class GatewayMetrics:
    """Counts what happens; `watch` adds what is, read when someone asks."""

    def __init__(self) -> None:
        self.grpc_handshakes = Handshakes()
        self._registry = CollectorRegistry()
        disable_created_metrics()  # type: ignore[no-untyped-call] # a second series for each counter, which nobody asks for
        self.tallies = tallies = Tallies()
        self._registry.register(_Tallied(tallies))
        self.ended, self.used = tallies.ended, tallies.used
        self.cached, self.judged = tallies.cached, tallies.judged
        self._retries = Counter(
            "kvherd_gateway_retries",
            "Requests sent elsewhere after this worker failed",
            ["worker"],
            registry=self._registry,
        )
        self._retries_refused = self._counter(
            "retries_refused", "Requests not sent elsewhere after this worker failed, for the retry budget was spent"
        )
        self._refused = Counter(
            "kvherd_gateway_refused_requests",
            "Requests turned away before a worker was chosen, by the code of the error",
            ["code"],
            registry=self._registry,
        )
        self._unread = Counter(
            "kvherd_gateway_unread_requests",
            "Requests that were answered before they were read whole, by the code of the error",
            ["code"],
            registry=self._registry,
        )
        self._held_s = Histogram(
            "kvherd_gateway_held_seconds",
            "How long requests waited for a worker to have room, of those that did",
            ["model"],
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._tls_refusals = Counter(
            "kvherd_gateway_tls_refusals", "TLS handshakes of clients that failed", ["reason"], registry=self._registry
        )
        self._flushes = self._counter("flushes", "Outcomes of ordered flushes", "outcome")
        self._samples = self._counter("usage_samples", "Streams asked for their usage on the gateway's own account")
        self._healings = self._counter("healings", "Full reports asked for, and flushes, of incomplete workers", "how")
        self._rebuilds = self._counter("rebuilds", "Entries of the index rebuilt because predictions were wrong")
        self._roster: Roster | None = None
        self._ordered: dict[str, None] = {}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvherd_gateway_{name}", text, ["worker", *labels], registry=self._registry)

    def held(self, model: str, seconds: float) -> None:
        self._held_s.labels(model).observe(seconds)

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def unread(self, code: str) -> None:
        self._unread.labels(code).inc()

    def retried(self, worker: WorkerId) -> None:
        self._retries.labels(worker).inc()

    def retry_refused(self, worker: WorkerId) -> None:
        self._retries_refused.labels(worker).inc()

    def sampled(self, worker: WorkerId) -> None:
        self._samples.labels(worker).inc()

    def healed(self, worker: WorkerId, how: str) -> None:
        self._healings.labels(worker, how).inc()

    def rebuilt(self, worker: WorkerId) -> None:
        self._rebuilds.labels(worker).inc()

    def flushed(self, report: FanoutReport) -> None:
        for result in report.results:
            self._ordered[result.worker] = None
            self._flushes.labels(result.worker, result.outcome.value).inc()

    def watch(self, roster: Roster, kv: Callable[[WorkerId], KvView], clock: Callable[[], float]) -> None:
        """Show the state of every worker whenever the metrics are read."""
        self._roster = roster
        self._registry.register(_FleetCollector(roster, kv, clock))

    def watch_admission(self, admission: Admitting) -> None:
        """Show how many requests are under way, and how many wait."""
        running = Gauge(
            "kvherd_gateway_running_requests", "Requests of the data path under way", registry=self._registry
        )
        running.set_function(lambda: admission.running)
        waiting = Gauge("kvherd_gateway_waiting_requests", "Requests that wait for their turn", registry=self._registry)
        waiting.set_function(lambda: admission.waiting)
        held = Gauge(
            "kvherd_gateway_held_requests", "Requests that wait for a worker to have room", registry=self._registry
        )
        held.set_function(lambda: admission.held)

    def watch_process(
        self, tasks: Callable[[], int], connections: Callable[[], int], lost: Mapping[str, Callable[[], int]]
    ) -> None:
        """Show what must not grow while the load does not; and how many lines of each log are `lost`."""
        own = Gauge("kvherd_gateway_tasks", "Of the event loop, at this moment", registry=self._registry)
        own.set_function(tasks)
        clients = Gauge("kvherd_gateway_client_connections", "Open at this moment", registry=self._registry)
        clients.set_function(connections)
        self._registry.register(_LostLines(lost))

    def watch_keys(self, keyring: Keyring) -> None:
        """Show what every data key uses whenever the metrics are read."""
        self._registry.register(_KeyCollector(keyring))

    def watch_certificate(self, tls: ServerTls) -> None:
        gauge = Gauge("kvherd_gateway_certificate_expires_seconds", "Since 1970", registry=self._registry)
        gauge.set_function(lambda: tls.expires_at_s)
        for reason in REASONS:
            self._tls_refusals.labels(reason)
        self._registry.register(_GrpcHandshakes(self.grpc_handshakes))

    def watch_worker_certificates(self, tls: WorkerTls, roster: Roster) -> None:
        """Show when the certificates of workers expire, and the one that they are shown."""
        self._registry.register(_WorkerCertificates(tls, roster))

    def tls_refused(self, reason: str) -> None:
        self._tls_refusals.labels(reason).inc()

    def watch_config(self, problem: Callable[[], str]) -> None:
        gauge = Gauge("kvherd_gateway_config_problem", "1 if the file is wrong as it stands", registry=self._registry)
        gauge.set_function(lambda: float(bool(problem())))

    def text(self) -> bytes:
        """The exposition format of Prometheus."""
        return b"".join(self._pieces())

    async def text_in_turns(self) -> bytes:
        """The same, with a turn of the event loop after each metric: those of a large fleet take a while."""
        pieces = []
        for piece in self._pieces():
            pieces.append(piece)
            await asyncio.sleep(0)
        return b"".join(pieces)

    def _pieces(self) -> Iterator[bytes]:
        self._forget_gone()
        for metric in self._registry.collect():
            yield generate_latest(_Alone(metric))

    def _forget_gone(self) -> None:
        """All but the latest of those that left."""
        roster = self._roster
        if roster is None:
            return
        known = dict.fromkeys((*self.tallies.workers(), *self._ordered))
        gone = [worker for worker in known if worker and roster.get(WorkerId(worker)) is None]
        for worker in gone[:-MOST_GONE]:
            self.tallies.forget(worker)
            self._ordered.pop(worker, None)
            for counter in (self._retries, self._retries_refused, self._samples, self._rebuilds):
                counter.remove(worker)
            for outcome in Outcome:
                self._flushes.remove(worker, outcome.value)
            for how in HealMode:
                self._healings.remove(worker, how.value)


class _WorkerCertificates(Collector):
    def __init__(self, tls: WorkerTls, roster: Roster) -> None:
        self._tls = tls
        self._roster = roster

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        shown = GaugeMetricFamily("kvherd_gateway_worker_certificate_expires_seconds", "Shown to workers, since 1970")
        if self._tls.expires_at_s is not None:
            shown.add_metric([], self._tls.expires_at_s)
        theirs = GaugeMetricFamily("kvherd_worker_certificate_expires_seconds", "Since 1970", labels=["worker"])
        for member in self._roster:
            expires_at_s = self._tls.peer_expires_at_s(member.worker)
            if expires_at_s is not None:
                theirs.add_metric([member.worker], expires_at_s)
        yield shown
        yield theirs


class _KeyCollector(Collector):
    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        in_flight = GaugeMetricFamily("kvherd_key_requests_in_flight", "Under way for a data key", labels=["key"])
        requests = CounterMetricFamily("kvherd_key_requests", "Of a data key, by verdict", labels=["key", "verdict"])
        for account in self._keyring.accounts:
            in_flight.add_metric([account.name], account.in_flight)
            requests.add_metric([account.name, "admitted"], account.admitted_total)
            requests.add_metric([account.name, "refused"], account.refused_total)
        yield in_flight
        yield requests


class _LostLines(Collector):
    def __init__(self, lost: Mapping[str, Callable[[], int]]) -> None:
        self._lost = lost

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        lines = CounterMetricFamily("kvherd_gateway_lost_log_lines", "That nobody took", labels=["log"])
        for name, count in self._lost.items():
            lines.add_metric([name], count())
        yield lines


class _GrpcHandshakes(Collector):
    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes

    def collect(self) -> Iterable[Metric]:
        name, text = "kvherd_gateway_grpc_handshakes", "TLS handshakes that clients of gRPC began, however they ended"
        yield CounterMetricFamily(name, text, value=self._handshakes.begun)


class _FleetCollector(Collector):
    def __init__(self, roster: Roster, kv: Callable[[WorkerId], KvView], clock: Callable[[], float]) -> None:
        self._roster = roster
        self._kv = kv
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        now_s = self._clock()
        members = list(self._roster)
        states = GaugeMetricFamily("kvherd_worker_state", "1 for the state a worker is in", labels=["worker", "state"])
        for member in members:
            for state in WorkerState:
                states.add_metric([member.worker, state.value], float(member.state is state))
        yield states
        circuits = GaugeMetricFamily(
            "kvherd_worker_breaker_state", "1 for the state its circuit breaker is in", labels=["worker", "state"]
        )
        for member in members:
            now = member.breaker.state(now_s)
            for circuit in BreakerState:
                circuits.add_metric([member.worker, circuit.value], float(now is circuit))
        yield circuits
        for name, text, read in self._readings(now_s):
            gauge = GaugeMetricFamily(name, text, labels=["worker"])
            for member in members:
                gauge.add_metric([member.worker], read(member))
            yield gauge
        following = GaugeMetricFamily(
            "kvherd_worker_kv_state", "1 for the state of a worker's KV follower", labels=["worker", "state"]
        )
        for member in members:
            following.add_metric([member.worker, self._kv(member.worker).state], 1.0)
        yield following

    def _readings(self, now_s: float) -> list[tuple[str, str, Callable[[Member], float]]]:
        return [
            ("kvherd_worker_running_requests", "Running there, as it said last", lambda one: one.running),
            (
                "kvherd_worker_differing_prompt_classes",
                "Classes of prompts that it tokenizes otherwise than the gateway",
                lambda one: len(one.differing),
            ),
            ("kvherd_worker_waiting_requests", "Waiting there, as it said last", lambda one: one.waiting),
            ("kvherd_worker_outstanding_requests", "Under way from this gateway", lambda one: len(one.in_flight)),
            (
                "kvherd_worker_backlog_seconds",
                "Prefill promised to it and not yet done",
                lambda one: one.backlog_s(now_s),
            ),
            (
                "kvherd_worker_slot_wait_seconds",
                "Until a request sent there now would have a slot",
                lambda one: one.slot_wait_s(),
            ),
            (
                "kvherd_worker_prefill_tokens_per_second",
                "Its prefill rate as learned",
                lambda one: one.rate.at(now_s),
            ),
            (
                "kvherd_worker_kv_incomplete",
                "1 if it may hold blocks that nobody told of",
                lambda one: float(not self._kv(one.worker).complete),
            ),
            ("kvherd_worker_kv_blocks", "Blocks it is credited with", lambda one: self._kv(one.worker).blocks),
            (
                "kvherd_worker_kv_lag_seconds",
                "From the engine's stamp of its last KV event batch to when it was applied",
                lambda one: self._kv(one.worker).lag_s or 0.0,
            ),
            (
                "kvherd_worker_kv_worst_lag_seconds",
                "The same, the worst of the last minute",
                lambda one: self._kv(one.worker).worst_lag_s or 0.0,
            ),
            (
                "kvherd_worker_prediction_error_ratio",
                "Wrong predictions of cached tokens among the last 200 decided",
                lambda one: one.truth.error_rate,
            ),
        ]
