"""The embedded engine in depth: what the host tier saves, and what data-parallel ranks give.

    .venv/bin/python bench/engine_tiers.py [--rounds 3]

One engine with a small pool and a host tier (real model): the time to the first token of a prompt of about 1,500
tokens, cold, from the pool, and from the host after others pushed it out (goal: at most 0.3 of cold); then from the
store of blocks, by an engine that has just started.
Then the same work (sixteen prompts at once) by one engine of two ranks and by two engines side by side, one thread a
rank: tokens a second, and their ratio; the goal is at least 0.9. Prints ratios, writes bench/out/engine_tiers.json.
"""

import argparse
import asyncio
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

OUT = Path(__file__).parent / "out" / "engine_tiers.json"
HOST_GOAL, RANKS_GOAL = 0.3, 0.9
WORDS = ["river", "stone", "lantern", "orchard", "copper", "meadow", "violin", "harbor", "thunder", "pebble"]
START_S = 120.0


@contextmanager
def engine(port: int, *options: str) -> Iterator[int]:
    """A running engine; its HTTP port."""
    command = [sys.executable, "-m", "kvherd.cli.main", "engine", "--port", str(port), "--log-level", "error", *options]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        deadline_s = time.monotonic() + START_S
        while not answers(port + 2):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the engine at port {port} did not start")
            time.sleep(0.1)
        yield port + 2
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


def answers(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def prompt(seed: int, words: int) -> str:
    dice = random.Random(seed)
    return " ".join(dice.choice(WORDS) for _ in range(words))


def ask(port: int, text: str, *, tokens: int) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token of a streamed answer, and its usage."""
    body = {
        "model": "smollm2",
        "prompt": text,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    begin_s = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    first_s = 0.0
    usage: dict[str, Any] = {}
    for line in response:
        if line.startswith(b"data: {"):
            first_s = first_s or time.monotonic() - begin_s
            usage = json.loads(line[6:]).get("usage") or usage
    connection.close()
    return first_s, usage


def one_engine(port: int, rounds: int, seen: dict[str, list[float]]) -> list[Any]:
    """Time prompts cold, from the pool and from the host; what the usage told of the last."""
    loaded = []
    for number in range(rounds):
        text = prompt(number, 1400)
        seen["cold"].append(ask(port, text, tokens=2)[0])
        seen["pool"].append(ask(port, text, tokens=2)[0])
        time.sleep(0.5)  # what is written behind is not waited for by anybody else either
        ask(port, prompt(1000 + number, 1400), tokens=2)
        first_s, usage = ask(port, text, tokens=2)
        seen["host"].append(first_s)
        loaded.append(usage["prompt_tokens_details"])
    return loaded


def host_tier(rounds: int) -> dict[str, Any]:
    seen: dict[str, list[float]] = {"cold": [], "pool": [], "host": [], "store": []}
    with TemporaryDirectory() as storage:
        sizes = ("--kv-tokens", "2048", "--host-kv-tokens", "16384", "--storage-dir", storage)
        with engine(23_000, *sizes) as port:
            loaded = one_engine(port, rounds, seen)
        with engine(23_000, *sizes) as port:
            ask(port, prompt(2000, 10), tokens=2)  # the first answer of a process is slower than any other
            for number in range(rounds):
                seen["store"].append(ask(port, prompt(number, 1400), tokens=2)[0])
    middle = {name: statistics.median(times) for name, times in seen.items()}
    for name, first_s in middle.items():
        print(f"  {name:<5} TTFT {first_s * 1000:>8.0f} ms   {first_s / middle['cold']:.3f} of cold")
    print(f"  from the host: {loaded[-1]} of the last prompt (goal: at most {HOST_GOAL} of cold)")
    return {"ttft_s": seen, "host_to_cold": middle["host"] / middle["cold"], "loaded": loaded}


async def work(ports: list[int], requests: int, tokens: int) -> float:
    """Tokens a second of prompts and answers, all requests at once, spread over the engines in turn."""
    begin_s = time.monotonic()
    asked = [
        asyncio.to_thread(ask, ports[number % len(ports)], prompt(5000 + number, 180), tokens=tokens)
        for number in range(requests)
    ]
    told = await asyncio.gather(*asked)
    total: int = sum(usage["total_tokens"] for _, usage in told)
    return total / (time.monotonic() - begin_s)


def ranks(rounds: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"two engines": [], "two ranks": []}
    with ExitStack() as stack:
        pair = [stack.enter_context(engine(port, "--threads", "1")) for port in (24_000, 24_100)]
        dp = [stack.enter_context(engine(25_000, "--dp-size", "2", "--threads", "1"))]
        for _ in range(rounds):
            for name, ports in (("two engines", pair), ("two ranks", dp)):
                rates[name].append(asyncio.run(work(ports, 16, 8)))
                for port in ports:
                    flush = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                    flush.request("POST", "/flush_cache?timeout=10")
                    flush.getresponse().read()
    ratio = statistics.median(rates["two ranks"]) / statistics.median(rates["two engines"])
    for name, found in rates.items():
        print(f"  {name:<12} {statistics.median(found):>8.0f} tokens/s")
    print(f"  two ranks ÷ two engines: {ratio:.2f} (goal: at least {RANKS_GOAL})")
    return {"tokens_per_s": rates, "ratio": ratio}


def main(rounds: int) -> None:
    print("host tier")
    told = {"host_tier": host_tier(rounds)}
    print("data-parallel ranks")
    told["ranks"] = ranks(rounds)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(told, indent=2), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    main(parser.parse_args().rounds)
