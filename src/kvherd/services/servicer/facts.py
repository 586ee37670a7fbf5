"""What an engine says of itself, the same through every door."""

import time
from datetime import UTC, datetime

from kvherd import __version__
from kvherd.core.engine.reports import OrderReport, RankLoad
from kvherd.core.errors import EngineError
from kvherd.ports.scheduler import Scheduler
from kvherd.services.servicer.config import ServicerConfig


class EngineFacts:
    """`failure` is set when the engine can serve no more; every door reads it here."""

    def __init__(self, config: ServicerConfig, scheduler: Scheduler) -> None:
        self._config = config
        self._scheduler = scheduler
        self._began_s = time.monotonic()
        self.started = datetime.now(UTC)
        self.failure: EngineError | None = None

    def uptime_s(self) -> float:
        return time.monotonic() - self._began_s

    def server_args(self) -> dict[str, object]:
        rank = self._scheduler.ranks[0]
        return {
            "model_path": self._config.model_path,
            "served_model_name": self._config.model_name,
            "tokenizer_path": self._config.model_name,
            "host": self._config.host,
            "port": self._config.port,
            "dp_size": len(self._scheduler.ranks),
            "tp_size": 1,
            "page_size": rank.block_size,
            "context_length": rank.max_context_tokens,
            "max_running_requests": rank.max_running,
            "max_total_tokens": rank.capacity_tokens,
            "kv_events_endpoints": [each.events_endpoint for each in self._scheduler.ranks],
            "kv_replay_endpoints": [each.replay_endpoint for each in self._scheduler.ranks],
        }

    def scheduler_info(self, report: OrderReport) -> dict[str, object]:
        rank = self._scheduler.ranks[0]
        return {
            "status": "ready",
            "max_total_num_tokens": rank.capacity_tokens,
            "max_req_input_len": min(rank.max_context_tokens, rank.capacity_tokens) - 1,
            "ranks": [rank_state(each.rank, each.load) for each in report.answers if each.load is not None],
        }

    def server_info(self, report: OrderReport) -> dict[str, object]:
        """The body of GET /server_info: SGLang's fields, and what a gateway of ours looks for."""
        loads = [each.load for each in report.answers if each.load is not None]
        return self.server_args() | {
            "kvherd": {
                "version": __version__,
                "grpc_port": self._config.port,
                "http_port": self._config.http_port,
                "sidecar_port": self._config.sidecar_port,
            },
            "version": f"kvherd-{__version__}",
            "status": "ready",
            "block_size": self._scheduler.ranks[0].block_size,
            "max_total_num_tokens": sum(rank.capacity_tokens for rank in self._scheduler.ranks),
            "max_req_input_len": self.scheduler_info(report)["max_req_input_len"],
            "uptime_s": round(self.uptime_s(), 3),
            "kv_events": {"grpc": f"{self._config.host}:{self._config.port}"},
            "internal_states": [_internal_state(load) for load in loads],
        }


def rank_state(rank: int, load: RankLoad) -> dict[str, object]:
    return {
        "dp_rank": rank,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_waiting_uncached_tokens": load.waiting_uncached_tokens,
        "num_used_tokens": load.used_tokens,
        "num_active_tokens": load.active_tokens,
        "max_total_num_tokens": load.capacity_tokens,
        "max_running_requests": load.max_running,
        "token_usage": load.used_tokens / load.capacity_tokens if load.capacity_tokens else 0.0,
        "gen_throughput": load.gen_tokens_per_s,
        "prompt_tokens_total": load.prompt_tokens_total,
        "cached_tokens_total": load.cached_tokens_total,
    }


def _internal_state(load: RankLoad) -> dict[str, object]:
    """The fields that SGLang's bench clients read."""
    return {
        "effective_max_running_requests_per_dp": load.max_running,
        "last_gen_throughput": load.gen_tokens_per_s,
        "memory_usage": {"token_capacity": load.capacity_tokens},
    }
