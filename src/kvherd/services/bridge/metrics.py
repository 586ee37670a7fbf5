"""What a bridge tells those who watch it: Prometheus text, and its health as JSON."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvherd.core.fleet.host_names import HostNames, HostUnknown
from kvherd.ports.tls import ServerTls
from kvherd.services.bridge.pulse import Pulse
from kvherd.services.kv_relay.event_streams import EventStreams
from kvherd.services.kv_relay.rank_view import RankView
from kvherd.services.kv_relay.relay import KvRelay
from kvherd.services.tls.handshakes import Handshakes
from kvherd.wire.status import public_message, status_of

_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_RANK_GAUGES: Final[Mapping[str, tuple[str, Callable[[RankView], float | None]]]] = {
    "batches": ("Batches told in this epoch.", lambda one: one.batches),
    "engine_sequence": (
        "The engine's own number of the last batch, -1 before the first.",
        lambda one: one.engine_sequence,
    ),
    "blocks": ("Different blocks it is known to hold.", lambda one: one.blocks),
    "unknown_before_batches": ("Batches of the engine's life that nobody saw.", lambda one: one.unknown_before),
    "in_doubt": ("1 while what is told may not be all, or not be true.", lambda one: bool(one.doubt)),
    "lag_seconds": ("From the engine's stamp of the last batch to here.", lambda one: one.lag_s),
    "worst_lag_seconds": ("The longest lag of the last minute.", lambda one: one.worst_lag_s),
}
_RANK_TOTALS: Final[Mapping[str, tuple[str, Callable[[RankView], float]]]] = {
    "gaps": ("Live batches that showed that others before them did not come.", lambda one: one.gaps),
    "bad_messages": ("Messages of no known form.", lambda one: one.bad_frames),
}
_TOTALS: Final = {
    "frames": "Batches of the engine that were taken.",
    "replays": "Replays that were asked for.",
    "lives": "Epochs that were begun.",
    "flushes": "Flushes that the engine obeyed.",
    "bad_batches": "Batches whose bytes could not be read.",
    "untranslatable": "Batches that say what cannot be passed on without loss.",
}


class BridgeMetrics(Collector):
    """`relay` and `streams` are None where the engine tells its events itself."""

    def __init__(
        self,
        relay: KvRelay | None,
        streams: EventStreams | None,
        pulse: Pulse,
        *,
        tls: ServerTls | None = None,
        handshakes: Handshakes | None = None,
    ) -> None:
        self._tls = tls
        self._handshakes = handshakes
        self._relay = relay
        self._streams = streams
        self.pulse = pulse
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def health(self) -> dict[str, Any]:
        return {
            "engine": {"up": self.pulse.up, "problem": self.pulse.problem},
            "epoch": None if self._relay is None else self._relay.epoch,
            "ranks": [{"rank": one.rank, "blocks": one.blocks, "doubt": one.doubt} for one in self._ranks],
            "subscribers": 0 if self._streams is None else len(self._streams),
        }

    @property
    def _ranks(self) -> tuple[RankView, ...]:
        return () if self._relay is None else self._relay.ranks

    def collect(self) -> Iterator[Metric]:
        yield _gauge("engine_up", "1 if the engine answered its last probe.", float(bool(self.pulse.up)))
        if self._tls is not None:
            yield _gauge("certificate_expires_seconds", "Since 1970.", self._tls.expires_at_s)
            if self._handshakes is not None:
                name, text = _name("grpc_handshakes"), "TLS handshakes that readers began, however they ended."
                yield CounterMetricFamily(name, text, value=self._handshakes.begun)
        if self._relay is not None:
            yield from self._of_relay(self._relay)
        if self._streams is not None:
            yield from _of_streams(self._streams)

    def _of_relay(self, relay: KvRelay) -> Iterator[Metric]:
        epoch = GaugeMetricFamily(_name("epoch_info"), "1, with the present epoch as a label.", labels=["epoch"])
        epoch.add_metric([relay.epoch], 1.0)
        yield epoch
        for name, meaning in _TOTALS.items():
            yield CounterMetricFamily(_name(name), meaning, value=relay.counts[name])
        ranks = relay.ranks
        for name, (meaning, gauge) in _RANK_GAUGES.items():
            family = GaugeMetricFamily(_name(name), meaning, labels=["rank"])
            for one in ranks:
                value = gauge(one)
                if value is not None:
                    family.add_metric([str(one.rank)], value)
            yield family
        for name, (meaning, total) in _RANK_TOTALS.items():
            counter = CounterMetricFamily(_name(name), meaning, labels=["rank"])
            for one in ranks:
                counter.add_metric([str(one.rank)], total(one))
            yield counter


def _of_streams(streams: EventStreams) -> Iterator[Metric]:
    yield _gauge("subscribers", "Event streams that are open.", len(streams))
    outcomes = CounterMetricFamily(_name("subscriptions"), "Subscriptions, by what became of them.", labels=["outcome"])
    for outcome in ("accepted", "refused", "cut_off"):
        outcomes.add_metric([outcome], streams.counts[outcome])
    yield outcomes


def metrics_app(metrics: BridgeMetrics) -> Starlette:
    names = HostNames("localhost", mend="ask it as localhost or by its address")

    async def text(request: Request) -> Response:
        names.check(request.headers.get("host", ""))
        return Response(metrics.text(), headers={"content-type": _CONTENT_TYPE})

    async def health(request: Request) -> Response:
        names.check(request.headers.get("host", ""))
        return JSONResponse(metrics.health())

    return Starlette(
        routes=[Route("/metrics", text), Route("/health", health)], exception_handlers={HostUnknown: _not_here}
    )


async def _not_here(_: Request, error: Exception) -> Response:
    return PlainTextResponse(public_message(error), status_of(error).http)


def _name(name: str) -> str:
    return f"kvherd_bridge_{name}"


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(_name(name), meaning, value=value)
