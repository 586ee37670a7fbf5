"""What a gateway has loaded, and what comes when: an idle one keeps for months whatever it has imported."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvherd.adapters.vocabulary import hf_files, tiny_vocabulary
from kvherd.testing.herds import get
from kvherd.testing.processes import OwnedProcess, free_ports
from kvherd.testing.raw_http import RawClient, until
from kvherd.testing.soak_load import QUICK, QuickServer, post
from kvherd.wire.proto import kvherd_gateway_v1_pb2 as pb
from kvherd.wire.proto import kvherd_gateway_v1_pb2_grpc as pb_grpc

pytestmark = pytest.mark.engine

OF_COMMANDS = {"typer", "rich", "pydantic"}
OF_GRPC = {"grpc", "google.protobuf", "smg_grpc_proto"}
OF_SOCKETS = {"zmq"}
OF_PROMPTS = {"tokenizers", "jinja2"}
COSTLY = OF_COMMANDS | OF_GRPC | OF_SOCKETS | OF_PROMPTS

TELLER = """
import json, os, sys, threading, time

def tell():
    while True:
        time.sleep(0.05)
        if os.path.exists("{folder}/ask"):
            with open("{folder}/telling", "w") as file:
                json.dump(list(sys.modules), file)
            os.remove("{folder}/ask")
            os.replace("{folder}/telling", "{folder}/told")

threading.Thread(target=tell, daemon=True).start()
"""
"""Python runs `sitecustomize` before all else, in the process that reads the words and again where it starts over."""


class TellingGateway:
    """A gateway whose process says what it has imported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_ports((0, 1))
        (folder / "sitecustomize.py").write_text(TELLER.format(folder=folder))
        words = ["--port", str(self.port), "--grpc-port", str(self.port + 1), "--host-name", "h"]
        path = os.pathsep.join((str(folder), *filter(None, [os.environ.get("PYTHONPATH")])))
        command = [sys.executable, "-m", "kvherd.cli.main", "gateway", *words]
        self.process = OwnedProcess(command, environment={"PYTHONPATH": path})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def costly(self) -> set[str]:
        """Which costly libraries are there."""
        (self._folder / "told").unlink(missing_ok=True)
        (self._folder / "ask").touch()
        await until((self._folder / "told").exists, "it says what it has imported", within_s=60.0)
        return COSTLY & set(json.loads((self._folder / "told").read_text()))

    async def has_loaded(self, wanted: set[str]) -> None:
        async with asyncio.timeout(60.0):
            while not wanted <= await self.costly():  # noqa: ASYNC110 - it is another process that does
                await asyncio.sleep(0.1)

    async def add(self, **worker: object) -> None:
        async with RawClient(self.port) as client:
            answer = await client.answer_to(post("/workers", worker), within_s=60.0)
        assert answer.status in (200, 201, 202), answer.body

    async def answers(self) -> None:
        async with RawClient(self.port) as client:
            asked = post("/v1/completions", {"model": QUICK, "prompt": "a"})
            answer = await client.answer_to(asked, within_s=60.0)
        assert answer.status == 200


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[TellingGateway]:
    telling = TellingGateway(tmp_path)
    with telling.process as process:
        process.wait_for(lambda: get(f"{telling.url}/health")[0] == 200, what="the gateway answers")
        yield telling


async def test_a_gateway_before_an_http_worker_has_loaded_nothing_costly_once_it_has_answered(
    gateway: TellingGateway,
) -> None:
    async with QuickServer() as worker:
        await gateway.add(url=worker.url)
        await until(lambda: get(f"{gateway.url}/ready")[0] == 200, "the worker is up", within_s=60.0)
        await gateway.answers()
        assert await gateway.costly() == set()


async def test_a_worker_s_own_sockets_bring_zeromq_and_its_model_s_directory_the_tokenizer(
    gateway: TellingGateway, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name, content in hf_files(tiny_vocabulary()).items():
        (model / name).write_bytes(content)
    async with QuickServer() as worker:
        await gateway.add(url=worker.url, events="tcp://127.0.0.1:9", tokenizer=str(model))
        await gateway.has_loaded(OF_SOCKETS | OF_PROMPTS)
        assert await gateway.costly() == OF_SOCKETS | OF_PROMPTS


async def test_a_worker_on_grpc_brings_grpc(gateway: TellingGateway) -> None:
    await gateway.add(url="grpc://127.0.0.1:9")
    found = await gateway.costly()
    assert found >= OF_GRPC
    assert not found & (OF_COMMANDS | OF_SOCKETS)


async def test_a_caller_over_grpc_brings_grpc_and_is_answered(gateway: TellingGateway) -> None:
    assert await gateway.costly() == set()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port + 1}") as channel:
        stub = pb_grpc.GatewayStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.ListWorkers(pb.ListWorkersRequest(), timeout=60)
    assert list(answer.workers) == []
    assert await gateway.costly() == OF_GRPC - {"smg_grpc_proto"}
