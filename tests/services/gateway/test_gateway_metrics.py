"""The metrics page and the board speak of what a gateway measures, and of all of it."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvherd.core.errors import ModelUnknown
from kvherd.core.fleet.keyring import Keyring
from kvherd.core.fleet.roster import Roster
from kvherd.core.ids import RequestId
from kvherd.ports.completions import Usage
from kvherd.services.gateway.access import AccessLog
from kvherd.services.gateway.admission import Admission
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.relay.edge import DataRequest
from kvherd.wire.fleet_json import KvView

DOCS = Path(__file__).parents[3] / "docs"


class Certificate:
    expires_at_s = 1.0

    def peer_expires_at_s(self, url: str) -> float | None:
        return 2.0


def whole() -> GatewayMetrics:
    """As a gateway has them that was given everything."""
    metrics = GatewayMetrics()
    metrics.watch(Roster(), lambda _: KvView("live"), lambda: 0.0)
    metrics.watch_keys(Keyring())
    metrics.watch_admission(Admission())
    metrics.watch_certificate(Certificate())  # type: ignore[arg-type]
    metrics.watch_worker_certificates(Certificate(), Roster())  # type: ignore[arg-type]
    metrics.watch_config(lambda: "")
    return metrics


def exposed() -> dict[str, str]:
    """Name as a query has it → kind."""
    families = text_string_to_metric_families(whole().text().decode())
    return {f"{each.name}_total" if each.type == "counter" else each.name: each.type for each in families}


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
    assert 'kvherd_gateway_inter_token_seconds_bucket{le="0.05",worker="w"} 1.0' in text
