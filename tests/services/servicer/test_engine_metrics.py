"""The metrics page has every metric of an engine, and an engine has every metric of the page."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvherd.services.servicer.metrics import EngineMetrics, Outcome
from kvherd.testing.scheduler import FakeScheduler, rank_facts

PAGE = Path(__file__).parents[3] / "docs/metrics.md"
SGLANG = {
    "prompt_tokens_total",
    "cached_tokens_total",
    "generation_tokens_total",
    "num_running_reqs",
    "num_queue_reqs",
    "token_usage",
    "cache_hit_rate",
    "gen_throughput",
    "time_to_first_token_seconds",
    "hicache_host_used_tokens",
    "evicted_tokens_total",
}
"""What boards made for SGLang ask for."""


def exposed() -> dict[str, str]:
    """Name as a query has it → kind."""
    metrics = EngineMetrics("letters", FakeScheduler([rank_facts(0), rank_facts(1)]))
    metrics.first_token(0.1)
    metrics.next_tokens(0.2, 2)
    metrics.ended(0.3, Outcome.FINISHED)
    families = text_string_to_metric_families(metrics.text().decode())
    kinds = {f"{each.name}_total" if each.type == "counter" else each.name: each.type for each in families}
    return {name: kind for name, kind in kinds.items() if not name.endswith("_created")}


def test_the_page_and_the_engine_have_the_same_metrics_of_the_same_kinds() -> None:
    rows = re.findall(
        r"^\| `([\w:]+)` \| (\w+) \| [^|]+ \| [^|]+ \|$",
        PAGE.read_text().partition("\n## The gateway\n")[0],
        re.MULTILINE,
    )
    assert len(rows) == len(set(rows))
    assert dict(rows) == exposed()


def test_boards_made_for_sglang_find_their_names() -> None:
    assert {f"sglang:{name}" for name in SGLANG} <= set(exposed())


def test_tokens_that_came_together_share_their_time() -> None:
    metrics = EngineMetrics("letters", FakeScheduler())
    metrics.next_tokens(0.9, 3)
    assert 'sglang:inter_token_latency_seconds_count{model_name="letters"} 3.0' in metrics.text().decode()
    assert 'sglang:inter_token_latency_seconds_bucket{le="0.25",model_name="letters"} 0.0' in metrics.text().decode()
