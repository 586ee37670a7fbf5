"""What is counted at every request, in plain numbers: a gateway has one thread, and the library's own counters take a
lock and some calls each, five times a request.
"""

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from kvherd.core.fleet.truth import Verdict
from kvherd.ports.completions import Usage

_ITL_BUCKETS_S: Final[tuple[float, ...]] = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
TTFT_BUCKETS_S: Final[tuple[float, ...]] = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_E2E_BUCKETS_S: Final[tuple[float, ...]] = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Spread:
    """A histogram's numbers."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def saw(self, value: float) -> None:
        at = 0
        for bound in self._bounds:  # compiled, that is less than a call; most are below the first ones
            if value <= bound:
                break
            at += 1
        self._counts[at] += 1
        self._total += value

    def tell(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        buckets, sum_so_far = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            sum_so_far += count
            buckets.append((floatToGoString(bound), sum_so_far))  # type: ignore[no-untyped-call]
        family.add_metric(labels, buckets, self._total)


class Tally:
    """Of one model at one worker."""

    __slots__ = ("completion_tokens", "outcomes", "prompt_tokens", "used")

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.prompt_tokens = self.completion_tokens = 0
        self.used = False


class Tallies:
    """Requests, their tokens and times, by worker."""

    def __init__(self) -> None:
        self._requests: dict[str, dict[str, Tally]] = {}
        self._predicted: dict[str, int] = {}
        self._reported: dict[str, int] = {}
        self._verdicts: dict[tuple[str, str], int] = {}
        self._ttft_s: dict[str, Spread] = {}
        self._itl_s: dict[str, Spread] = {}
        self._e2e_s: dict[str, Spread] = {}

    def ended(self, worker: str, model: str, outcome: str, ttft_s: float | None, e2e_s: float) -> None:
        outcomes = self._tally(worker, model).outcomes
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if ttft_s is not None:
            _saw(self._ttft_s, worker, TTFT_BUCKETS_S, ttft_s)
        if outcome == "answered":
            _saw(self._e2e_s, worker, _E2E_BUCKETS_S, e2e_s)

    def used(self, worker: str, model: str, usage: Usage, itl_s: float | None) -> None:
        tally = self._tally(worker, model)
        tally.used = True
        tally.prompt_tokens += usage.prompt_tokens
        tally.completion_tokens += usage.completion_tokens
        if itl_s is not None:
            _saw(self._itl_s, worker, _ITL_BUCKETS_S, itl_s)

    def _tally(self, worker: str, model: str) -> Tally:
        models = self._requests.get(worker)
        if models is None:
            models = self._requests[worker] = {}
        tally = models.get(model)
        if tally is None:
            tally = models[model] = Tally()
        return tally

    def workers(self) -> list[str]:
        """Of which anything is counted, in the order in which they were met; "" stands for none."""
        return list(self._requests)

    def forget(self, worker: str) -> None:
        for counted in (self._requests, self._predicted, self._reported, self._ttft_s, self._itl_s, self._e2e_s):
            counted.pop(worker, None)
        for verdict in Verdict:
            self._verdicts.pop((worker, verdict.value), None)

    def cached(self, worker: str, predicted: int, reported: int | None) -> None:
        self._predicted[worker] = self._predicted.get(worker, 0) + predicted
        if reported is not None:
            self._reported[worker] = self._reported.get(worker, 0) + reported

    def judged(self, worker: str, verdict: Verdict) -> None:
        key = worker, verdict.value
        self._verdicts[key] = self._verdicts.get(key, 0) + 1

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "kvherd_gateway_requests",
            "Requests of the data path, by what became of them",
            labels=["worker", "model", "outcome"],
        )
        told = [(worker, model, tally) for worker, of in self._requests.items() for model, tally in of.items()]
        for worker, model, tally in told:
            for outcome, count in tally.outcomes.items():
                requests.add_metric([worker, model, outcome], count)
        yield requests
        tokens = CounterMetricFamily(
            "kvherd_gateway_tokens", "Tokens of answers that told their usage", labels=["worker", "model", "of"]
        )
        for worker, model, tally in told:
            if tally.used:
                tokens.add_metric([worker, model, "prompt"], tally.prompt_tokens)
                tokens.add_metric([worker, model, "completion"], tally.completion_tokens)
        yield tokens
        predicted = CounterMetricFamily(
            "kvherd_gateway_predicted_cached_tokens", "Prompt tokens expected to be cached", labels=["worker"]
        )
        reported = CounterMetricFamily(
            "kvherd_gateway_reported_cached_tokens", "Prompt tokens that answers reported as cached", labels=["worker"]
        )
        for family, by_worker in ((predicted, self._predicted), (reported, self._reported)):
            for worker, count in by_worker.items():
                family.add_metric([worker], count)
            yield family
        verdicts = CounterMetricFamily(
            "kvherd_gateway_predictions",
            "Predictions of cached tokens, by what answers said",
            labels=["worker", "verdict"],
        )
        for judged, count in self._verdicts.items():
            verdicts.add_metric(judged, count)
        yield verdicts
        yield _histogram(
            "kvherd_gateway_time_to_first_token_seconds",
            "From the complete request to its first token, or to its whole answer's first byte",
            self._ttft_s,
        )
        yield _histogram(
            "kvherd_gateway_inter_token_latency_seconds",
            "Between two tokens of a stream, the mean of each stream that told its usage",
            self._itl_s,
        )
        yield _histogram(
            "kvherd_gateway_e2e_request_latency_seconds",
            "From the complete request to the end of its answer, of those that were answered",
            self._e2e_s,
        )


def _saw(by_worker: dict[str, Spread], worker: str, bounds: tuple[float, ...], value: float) -> None:
    spread = by_worker.get(worker)
    if spread is None:
        spread = by_worker[worker] = Spread(bounds)
    spread.saw(value)


def _histogram(name: str, text: str, by_worker: dict[str, Spread]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=["worker"])
    for worker, spread in by_worker.items():
        spread.tell(family, [worker])
    return family
