"""The metrics page and the board speak of what a gateway measures, and of all of it."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvherd.core.errors import ModelUnknown
from kvherd.core.fleet.breaker import BreakerConfig
from kvherd.core.fleet.fanout import FanoutReport, Outcome, WorkerResult
from kvherd.core.fleet.keyring import DataKey, Keyring, key_digest
from kvherd.core.fleet.roster import Member, Roster
from kvherd.core.fleet.truth import Verdict
from kvherd.core.ids import RequestId, WorkerId
from kvherd.ports.completions import Usage
from kvherd.services.gateway.metrics import MOST_GONE, GatewayMetrics
from kvherd.services.gateway.relay.edge import DataRequest
from kvherd.services.gateway.turns.access import AccessLog
from kvherd.services.gateway.waiting.admission import Admission
from kvherd.wire.fleet_json import KvView

DOCS = Path(__file__).parents[3] / "docs"


class Certificate:
    expires_at_s = 1.0

    def peer_expires_at_s(self, url: str) -> float | None:
        return 2.0


def whole(roster: Roster | None = None, keyring: Keyring | None = None) -> GatewayMetrics:
    """As a gateway has them that was given everything."""
    metrics, roster = GatewayMetrics(), roster or Roster()
    metrics.watch(roster, lambda _: KvView("live"), lambda: 0.0)
    metrics.watch_keys(keyring or Keyring())
    metrics.watch_admission(Admission())
    metrics.watch_certificate(Certificate())  # type: ignore[arg-type]
    metrics.watch_worker_certificates(Certificate(), roster)  # type: ignore[arg-type]
    metrics.watch_config(lambda: "")
    metrics.watch_process(lambda: 7, lambda: 2, {"access": lambda: 3, "log": lambda: 0})
    return metrics


def exposed() -> dict[str, str]:
    """Name as a query has it → kind."""
    families = text_string_to_metric_families(whole().text().decode())
    return {f"{each.name}_total" if each.type == "counter" else each.name: each.type for each in families}


def test_of_workers_that_come_and_go_under_ever_new_addresses_the_metrics_do_not_grow() -> None:
    roster, usage = Roster(), Usage(10, 5, 7)
    roster.join(Member(WorkerId("http://stays")))
    metrics = whole(roster)
    workers = [WorkerId("http://stays"), *(WorkerId(f"http://pod{number}") for number in range(500))]
    for worker in workers:
        for _ in range(2):
            metrics.ended(worker, "m", "answered", 0.1, 0.3)
        metrics.used(worker, "m", usage, 0.01)
        metrics.cached(worker, 5, 5)
        metrics.judged(worker, Verdict.RIGHT)
        for counted in (metrics.retried, metrics.retry_refused, metrics.sampled, metrics.rebuilt):
            counted(worker)
        metrics.healed(worker, "report")
        metrics.flushed(FanoutReport((WorkerResult(worker, "", Outcome.DONE, "", 0.0),)))
    metrics.flushed(FanoutReport((WorkerResult(WorkerId("http://flushed"), "", Outcome.DONE, "", 0.0),)))
    told = metrics.text().decode()
    assert set(re.findall(r"http://\w+", told)) == {"http://stays", "http://flushed", *workers[-MOST_GONE + 1 :]}
    assert 'kvherd_gateway_requests_total{model="m",outcome="answered",worker="http://stays"} 2.0' in told


def test_the_state_of_a_circuit_breaker_is_told() -> None:
    roster, ann = Roster(), Member(WorkerId("http://ann"))
    roster.join(ann)
    metrics = whole(roster)

    def told() -> list[str]:
        return re.findall(
            r'kvherd_worker_breaker_state{state="([a-z-]+)",worker="http://ann"} 1', metrics.text().decode()
        )

    assert told() == ["closed"]
    for _ in range(BreakerConfig().min_requests):
        ann.breaker.failed(RequestId("r"), 0.0, 1.0)
    assert told() == ["open"]


def test_the_page_and_the_gateway_have_the_same_metrics_of_the_same_kinds() -> None:
    section = (DOCS / "metrics.md").read_text().partition("\n## The gateway\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \| [^|]+ \| [^|]+ \|$", section, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert dict(rows) == exposed()


def queries(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["expr"]] if "expr" in node else []
        return own + [found for inner in node.values() for found in queries(inner)]
    return [found for inner in node for found in queries(inner)] if isinstance(node, list) else []


def test_the_board_asks_for_what_there_is_and_leaves_nothing_out() -> None:
    board = json.loads((DOCS / "dashboards/grafana.json").read_text())
    asked = {name for query in queries(board) for name in re.findall(r"\bkvherd_\w+", query)}
    kinds = exposed()
    assert {re.sub(r"_bucket$", "", name) for name in asked} == set(kinds)
    for query in queries(board):
        for name in re.findall(r"\b(kvherd_\w+_total)\b", query):
            assert f"rate({name}" in query, f"{name} is a counter"


FUNCTIONS = frozenset({"sum", "max", "min", "rate", "histogram_quantile", "time", "vector"})
WORDS = frozenset({"by", "or", "le"})
OF_PROMETHEUS = frozenset({"instance", "job", "le"})


def labels() -> dict[str, set[str]]:
    """Name as a query has it → the labels that its samples have, once everything has happened."""
    told: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(busy().text().decode()):
        for sample in family.samples:
            told.setdefault(sample.name, set()).update(sample.labels)
    return told


def busy() -> GatewayMetrics:
    """After one of everything."""
    roster, keyring, ann = Roster(), Keyring(), WorkerId("https://ann:1")
    roster.join(Member(ann))
    keyring.replace([DataKey("web", key_digest("k"))])
    metrics = whole(roster, keyring)
    done = WorkerResult(ann, "vllm-http", Outcome.DONE, "", 0.1)
    metrics.ended(ann, "m", "answered", 0.1, 0.3)
    metrics.used(ann, "m", Usage(prompt_tokens=7, cached_tokens=None, completion_tokens=5), 0.04)
    metrics.cached(ann, 1, 1)
    metrics.judged(ann, Verdict.RIGHT)
    metrics.healed(ann, "report")
    metrics.flushed(FanoutReport((done,)))
    metrics.held("m", 0.1)
    metrics.refused("model_not_found")
    metrics.unread("frame_invalid")
    metrics.tls_refused("left")
    for count in (metrics.retried, metrics.retry_refused, metrics.sampled, metrics.rebuilt):
        count(ann)
    return metrics


def test_every_query_of_the_board_can_be_asked_and_can_be_answered() -> None:
    """Brackets close, functions exist, and no label is asked for, or shown in a legend, that a metric does not have."""
    board = json.loads((DOCS / "dashboards/grafana.json").read_text())
    had, seen = labels(), 0
    for target in targets(board):
        query = target["expr"]
        bare = re.sub(r'"[^"]*"|\[\w+\]', "", query)
        for opens, closes in ("()", "{}", "[]"):
            assert query.count(opens) == query.count(closes), query
        assert set(re.findall(r"(\w+)\s*\(", bare)) <= FUNCTIONS | WORDS, query
        asked = re.findall(r"(kvherd_\w+)(?:\{([^}]*)\})?", query)
        assert asked, query
        for name, matchers in asked:
            assert name in had, f"{name} has no sample, whatever happens"
            wanted = set(re.findall(r"(\w+)\s*[=!]~?", matchers))
            assert "instance" in wanted, f"{query}: of which gateway?"
            assert wanted <= had[name] | OF_PROMETHEUS, query
        grouped = [set(one.replace(" ", "").split(",")) for one in re.findall(r"\bby \(([^)]*)\)", query)]
        for kept in grouped:
            assert kept <= set().union(*(had[name] for name, _ in asked)), query
        known = set().union(*grouped) if grouped or "sum(" in query else had[asked[0][0]] | OF_PROMETHEUS
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, query
        seen += 1
    assert seen > 40


def targets(node: Any) -> list[dict[str, str]]:
    if isinstance(node, dict):
        return [node] if "expr" in node else [found for inner in node.values() for found in targets(inner)]
    return [found for inner in node for found in targets(inner)] if isinstance(node, list) else []


def test_a_board_s_variables_are_labels_that_there_are() -> None:
    board, had = json.loads((DOCS / "dashboards/grafana.json").read_text()), labels()
    queries_of = [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    for query in queries_of:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label in had[name] | OF_PROMETHEUS
    assert len(queries_of) == 2


def test_what_is_refused_is_counted_by_the_code_of_its_error() -> None:
    metrics = whole()
    request = DataRequest("POST", "/v1/completions", "", [], b"", "127.0.0.1:1", RequestId("r"))
    AccessLog(metrics).refused(request, ModelUnknown("x", ()))
    assert 'kvherd_gateway_refused_requests_total{code="model_not_found"} 1.0' in metrics.text().decode()


def test_tokens_and_the_time_between_them_are_counted() -> None:
    metrics = whole()
    metrics.used("w", "m", Usage(prompt_tokens=7, cached_tokens=None, completion_tokens=5), 0.04)
    text = metrics.text().decode()
    assert 'kvherd_gateway_tokens_total{model="m",of="prompt",worker="w"} 7.0' in text
    assert 'kvherd_gateway_tokens_total{model="m",of="completion",worker="w"} 5.0' in text
    assert 'kvherd_gateway_inter_token_latency_seconds_bucket{le="0.05",worker="w"} 1.0' in text


async def test_told_in_turns_the_metrics_are_the_same_and_others_have_turns_between_them() -> None:
    metrics, turns = busy(), 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    told = await metrics.text_in_turns()
    other.cancel()
    assert told == metrics.text()
    assert turns >= told.count(b"# TYPE")


async def test_a_worker_may_leave_while_the_metrics_are_told() -> None:
    roster, ann, bob = Roster(), WorkerId("http://ann"), WorkerId("http://bob")
    roster.join(Member(ann))
    metrics = whole(roster)
    metrics.ended(ann, "m", "answered", 0.1, 0.3)

    async def change() -> None:
        roster.leave(ann)
        roster.join(Member(bob))
        metrics.ended(bob, "m", "answered", 0.1, 0.3)

    told, _ = await asyncio.gather(metrics.text_in_turns(), change())
    assert b"kvherd_worker_state" in told
