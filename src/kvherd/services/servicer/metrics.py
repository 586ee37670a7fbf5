"""The engine's metrics: SGLang's names where the figure is the same, kvherd's own beside them.

Gauges and totals are read from the ranks' own reports when somebody asks; only what happens in the servicer is counted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvherd.core.engine.reports import RankLoad
from kvherd.ports.scheduler import Scheduler

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Outcome(StrEnum):
    """How a generation ended. Whoever reads it leaves at a stop string, or because the client did."""

    FINISHED = "finished"
    ABORTED = "aborted"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class _Figure:
    name: str
    meaning: str
    value: Callable[[RankLoad], float]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _tokens_in(blocks: str) -> Callable[[RankLoad], float]:
    def tokens(load: RankLoad) -> float:
        count: int = getattr(load, blocks)
        size = _share(load.capacity_tokens, load.used_blocks + load.cached_blocks + load.free_blocks)
        return count * size

    return tokens


_GAUGES = (
    _Figure("sglang:num_running_reqs", "Requests in the running batch.", lambda load: load.running),
    _Figure("sglang:num_queue_reqs", "Requests that wait to be admitted.", lambda load: load.waiting),
    _Figure("sglang:num_used_tokens", "Pool slots that hold anything.", lambda load: load.used_tokens),
    _Figure(
        "sglang:token_usage",
        "Share of the pool that holds anything.",
        lambda load: _share(load.used_tokens, load.capacity_tokens),
    ),
    _Figure(
        "sglang:cache_hit_rate",
        "Share of prompt tokens, since the start, that were cached.",
        lambda load: _share(load.cached_tokens_total, load.prompt_tokens_total),
    ),
    _Figure("sglang:kv_used_tokens", "Pool slots in blocks that running requests use.", _tokens_in("used_blocks")),
    _Figure("sglang:kv_evictable_tokens", "Pool slots in cached blocks nobody uses.", _tokens_in("cached_blocks")),
    _Figure("sglang:kv_available_tokens", "Pool slots in free blocks.", _tokens_in("free_blocks")),
    _Figure("sglang:hicache_host_used_tokens", "Tokens in the host tier.", lambda load: load.host_used_tokens),
    _Figure("sglang:hicache_host_total_tokens", "Tokens it can hold.", lambda load: load.host_capacity_tokens),
    _Figure("sglang:gen_throughput", "Output tokens per second.", lambda load: load.gen_tokens_per_s),
    _Figure("kvherd_pool_capacity_tokens", "Tokens that the pool holds.", lambda load: load.capacity_tokens),
    _Figure("kvherd_pool_active_tokens", "Pool slots that running requests pin.", lambda load: load.active_tokens),
    _Figure("kvherd_flushes_waiting", "Flushes that wait for an idle moment.", lambda load: load.flushes_waiting),
    _Figure(
        "kvherd_waiting_uncached_tokens",
        "Prompt tokens of waiting requests that are not cached.",
        lambda load: load.waiting_uncached_tokens,
    ),
)
_TOTALS = (
    _Figure("sglang:prompt_tokens", "Prompt tokens of admitted requests.", lambda load: load.prompt_tokens_total),
    _Figure("sglang:cached_tokens", "Prompt tokens taken from the cache.", lambda load: load.cached_tokens_total),
    _Figure("sglang:generation_tokens", "Output tokens.", lambda load: load.generated_tokens_total),
    _Figure("sglang:evicted_tokens", "Cached tokens evicted.", lambda load: load.evicted_tokens_total),
    _Figure("sglang:num_requests", "Requests taken.", lambda load: load.requests_total),
    _Figure("sglang:num_aborted_requests", "Requests aborted.", lambda load: load.aborts_total),
    _Figure("kvherd_flushes", "Times the cache was cleared by order.", lambda load: load.flushes_total),
    _Figure(
        "kvherd_host_loaded_tokens",
        "Tokens brought back from the host tier.",
        lambda load: load.host_loaded_tokens_total,
    ),
    _Figure(
        "kvherd_store_fetched_tokens",
        "Tokens read from the store behind the host tier.",
        lambda load: load.store_fetched_tokens_total,
    ),
    _Figure(
        "kvherd_store_put_tokens",
        "Tokens that were written to it, or were there already.",
        lambda load: load.store_put_tokens_total,
    ),
    _Figure("kvherd_store_failed_puts", "Blocks that it did not take.", lambda load: load.store_failed_puts_total),
    _Figure("kvherd_steps", "Steps of the scheduler.", lambda load: load.steps_total),
)


class _Loads(Collector):
    def __init__(self, model: str, loads: Callable[[], Sequence[RankLoad]]) -> None:
        self._model = model
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        loads = list(self._loads())
        for figure in _GAUGES:
            yield self._filled(GaugeMetricFamily(figure.name, figure.meaning, labels=_LABELS), figure, loads)
        for figure in _TOTALS:
            yield self._filled(CounterMetricFamily(figure.name, figure.meaning, labels=_LABELS), figure, loads)

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, figure: _Figure, loads: Iterable[RankLoad]
    ) -> Metric:
        for rank, load in enumerate(loads):
            family.add_metric([self._model, str(rank)], figure.value(load))
        return family


_LABELS = ("model_name", "dp_rank")


class _Orders(Collector):
    def __init__(self, model: str, scheduler: Scheduler) -> None:
        self._model = model
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("kvherd_orders_open", "Orders that wait for the ranks.", labels=["model_name"])
        waiting.add_metric([self._model], self._scheduler.open_orders)
        yield waiting
        late = CounterMetricFamily(
            "kvherd_late_order_answers", "Answers that came when nobody waited any more.", labels=["model_name"]
        )
        late.add_metric([self._model], self._scheduler.late_answers)
        yield late


class EngineMetrics:
    """One engine's registry."""

    def __init__(self, model: str, scheduler: Scheduler) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Loads(model, lambda: scheduler.loads))
        self._registry.register(_Orders(model, scheduler))
        self._ttft = self._seconds("sglang:time_to_first_token_seconds", "From the request to its first token.", model)
        self._itl = self._seconds("sglang:inter_token_latency_seconds", "Between two tokens of one answer.", model)
        self._whole = self._seconds("sglang:e2e_request_latency_seconds", "From the request to its end.", model)
        self._ended = Counter(
            "kvherd_generations",
            "Generations that ended, by outcome.",
            labelnames=["model_name", "outcome"],
            registry=self._registry,
        )
        self._model = model

    def _seconds(self, name: str, meaning: str, model: str) -> Histogram:
        histogram = Histogram(name, meaning, labelnames=["model_name"], registry=self._registry, buckets=_BUCKETS_S)
        return histogram.labels(model)

    def first_token(self, after_s: float) -> None:
        self._ttft.observe(after_s)

    def next_tokens(self, after_s: float, count: int) -> None:
        """So many tokens came together, so long after the last."""
        for _ in range(count):
            self._itl.observe(after_s / count)

    def ended(self, after_s: float, outcome: Outcome) -> None:
        self._whole.observe(after_s)
        self._ended.labels(self._model, outcome).inc()

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)
