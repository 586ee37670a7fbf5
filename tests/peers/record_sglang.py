"""Record what a stock SGLang publishes, and what it says was cached, into tests/fixtures/sglang-0.5.23.

KVHERD_SGLANG=.venv-sglang .venv/bin/python tests/peers/record_sglang.py DIRECTORY
"""

import json
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from kvherd.testing.processes import free_ports
from kvherd.testing.recordings import Recorder, ask_replay, write_recording
from kvherd.testing.stock_engines import StockEngine, sglang

VOCABULARY = 40_000


class Session:
    """One server and what it was asked, with its answers."""

    def __init__(self, engine: StockEngine, seed: int) -> None:
        self.engine = engine
        self.truth: list[dict[str, Any]] = []
        self.dice = random.Random(seed)
        self.talks: dict[int, list[int]] = {}

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(10, VOCABULARY) for _ in range(count)]

    def ask(self, prompt: list[int], **more: Any) -> list[int]:
        sampling = {"max_new_tokens": self.dice.randrange(1, 9), "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling} | more
        began_s = time.time()
        answer = httpx.post(f"{self.engine.server.url}/generate", json=body, timeout=120).raise_for_status().json()
        told = {"op": "generate", "t0": began_s, "t1": time.time(), "prompt_token_ids": prompt} | more
        told |= {"output_ids": answer["output_ids"], "cached": answer["meta_info"]["cached_tokens"]}
        self.truth.append(told)
        time.sleep(0.15)  # what it publishes is on its way
        output: list[int] = answer["output_ids"]
        return output

    def talk(self, turns: int, *, talks: int = 5) -> None:
        """Turns of several conversations, each of which begins anew after a while."""
        for _ in range(turns):
            number = self.dice.randrange(talks)
            prompt = self.talks.get(number, [])
            if not prompt or len(prompt) > 300:
                prompt = self.tokens(self.dice.randrange(40, 120))
            self.talks[number] = prompt + self.ask(prompt) + self.tokens(self.dice.randrange(10, 60))

    def flush(self) -> None:
        began_s = time.time()
        answer = httpx.post(f"{self.engine.server.url}/flush_cache?timeout=5", timeout=20)
        self.truth.append({"op": "flush", "t0": began_s, "t1": time.time(), "status": answer.status_code})
        time.sleep(0.3)

    def restart(self) -> None:
        began_s = time.time()
        self.engine.kill()
        self.engine.begin()
        self.engine.await_ready()
        self.truth.append({"op": "restart", "t0": began_s, "t1": time.time()})
        time.sleep(1.0)

    def write(self, path: Path) -> None:
        path.write_text("".join(json.dumps(each) + "\n" for each in self.truth))


def begin(stack: ExitStack, page_size: int, layout: str = "default") -> tuple[Session, Recorder]:
    port = free_ports((0, 1, 2))
    server = sglang(
        port,
        events=f"tcp://127.0.0.1:{port + 1}",
        replay=f"tcp://127.0.0.1:{port + 2}",
        page_size=page_size,
        layout=layout,
        options=("--max-total-tokens", "1024"),
    )
    recorder = stack.enter_context(Recorder(server.events))
    engine = StockEngine(server, stack.enter_context)
    engine.await_ready()
    return Session(engine, seed=page_size), recorder


def record(folder: Path, stack: ExitStack, name: str, page_size: int) -> tuple[Session, Recorder]:
    session, recorder = begin(stack, page_size)
    session.talk(40)
    session.flush()
    session.talk(12)
    session.flush()
    session.flush()
    session.talk(6)
    session.write(folder / f"{name}_truth.jsonl")
    write_recording(folder / f"{name}.bin", recorder.messages)
    return session, recorder


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        record(folder, stack, "page1", 1)
    with ExitStack() as stack:
        session, recorder = record(folder, stack, "page16", 16)
        replay = session.engine.server.replay or ""
        last = recorder.messages[-1].sequence
        for name, start in [("replay_end", last - 2), ("replay_future", last + 100)]:
            write_recording(folder / f"{name}.bin", ask_replay(replay, start))
        namespaces(folder, "namespaces", session, recorder)
    with ExitStack() as stack:
        session, recorder = begin(stack, 16)
        session.talk(10)
        session.restart()
        session.talk(16)
        write_recording(folder / "restart.bin", recorder.messages)
        session.write(folder / "restart_truth.jsonl")
        write_recording(folder / "replay_after_restart.bin", ask_replay(session.engine.server.replay or "", 1000))
    with ExitStack() as stack:
        namespaces(folder, "namespaces_dynamo", *begin(stack, 16, "dynamo"))


def namespaces(folder: Path, name: str, session: Session, recorder: Recorder) -> None:
    """The same tokens without and with a salt and an extra key."""
    recorder.messages.clear()
    session.truth.clear()
    prompt = session.tokens(70)
    for more in ({}, {"cache_salt": "alpha"}, {"extra_key": "beta"}, {"cache_salt": "alpha", "extra_key": "beta"}):
        for _ in range(2):
            session.ask(prompt, **more)
    write_recording(folder / f"{name}.bin", recorder.messages)
    session.write(folder / f"{name}_truth.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
