"""A real gateway over one real engine, and the OpenAI client before it, for tests."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import openai

from kvherd.testing.herds import EngineProcess, GatewayProcess, begin_engine, begin_gateway, get
from kvherd.testing.processes import KvherdProcess

ANSWER_S = 60.0


@dataclass(frozen=True)
class Door:
    """`kind` says how the gateway speaks to its worker: grpc or http."""

    kind: str
    client: openai.OpenAI
    engine: EngineProcess
    gateway: GatewayProcess

    @property
    def worker(self) -> str:
        return self.engine.grpc_url if self.kind == "grpc" else self.engine.url

    def running(self) -> int:
        """Requests that the engine has."""
        loads = json.loads(get(f"{self.engine.url}/get_loads")[1])["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


@contextmanager
def open_door(kind: str) -> Iterator[Door]:
    with ExitStack() as stack:

        def start(*words: str) -> KvherdProcess:
            return stack.enter_context(KvherdProcess(*words))

        engine = begin_engine(start)
        gateway = begin_gateway(start, engine.grpc_url if kind == "grpc" else engine.http_worker, up=1)
        base_url = f"{gateway.url}/v1"
        client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=ANSWER_S)
        yield Door(kind, stack.enter_context(client), engine, gateway)
