"""A stock vLLM with two LoRA adapters: each of them and their base have blocks of their own, and credit for no others.

`make test-vllm` installs it and runs these tests.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvherd.testing.doctors import running
from kvherd.testing.herds import GatewayProcess, Start, begin_gateway
from kvherd.testing.lora_adapters import RANK, write_adapter
from kvherd.testing.processes import free_ports
from kvherd.testing.stock_engines import MODEL, StockServer, model_directory, vllm
from kvherd.testing.stock_herds import LIVE_S, can_predict, chat, chat_until_exact, settle, truth_of

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

ADAPTERS = ("poet", "clerk")
NAMES = (MODEL, *ADAPTERS)


@pytest.fixture(scope="module")
def server() -> Iterator[StockServer]:
    with TemporaryDirectory(prefix="kht-", dir="/tmp") as name:
        folder = Path(name)
        for seed, adapter in enumerate(ADAPTERS):
            write_adapter(folder / adapter, model_directory(), seed=seed)
        modules = [f"{adapter}={folder / adapter}" for adapter in ADAPTERS]
        options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK), "--lora-modules", *modules)
        one = vllm(free_ports((0,)), events=f"ipc://{folder}/events", replay=f"ipc://{folder}/replay", options=options)
        with running(one):
            yield one


def test_each_is_predicted_by_its_own_blocks_through_a_bridge(server: StockServer, start: Start) -> None:
    listen = f"127.0.0.1:{free_ports((0,))}"
    start(*server.bridge_words(listen))
    told_apart(begin_gateway(start, f"{server.url},events=grpc://{listen}", up=1), seed=1)


def test_each_is_predicted_by_its_own_blocks_from_the_engine_s_sockets(server: StockServer, start: Start) -> None:
    told_apart(begin_gateway(start, server.direct_worker, up=1), seed=2)


def told_apart(gateway: GatewayProcess, seed: int) -> None:
    gateway.process.wait_for(lambda: can_predict(gateway), within_s=LIVE_S, what="it follows the engine")
    (worker,) = gateway.workers()
    assert worker["models"] == list(NAMES)
    messages = [{"role": "user", "content": f"Tell me of the number {seed}. " * 12}]
    said = set()
    for name in NAMES:  # the second and third find the first's blocks there, of the same tokens, and may not have them
        cold, text = chat(gateway, messages, model=name)
        assert (cold.predicted, cold.reported) == (0, 0), name
        assert chat_until_exact(gateway, messages, model=name).reported >= 64
        said.add(text)
    assert len(said) > 1, "the adapters change what is said, so that their blocks must differ, too"
    dice, answers = random.Random(seed), []
    prompts = [[{"role": "user", "content": f"{seed}: what are {number} and {number}? " * 8}] for number in range(3)]
    for _ in range(40):
        name, prompt = dice.choice(NAMES), dice.choice(prompts)
        answered, _ = chat(gateway, prompt, model=name)
        answers.append((name, answered))
        settle(gateway)
    wrong = [one for one in answers if not one[1].exact]
    assert len(wrong) <= 2, wrong
    assert sum(one.reported > 0 for _, one in answers) >= 20, answers
    assert truth_of(gateway)["wrong"] == 0
