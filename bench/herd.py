"""The herd as its user feels it: start to first token, and what a cached prefix saves.

    python bench/herd.py

Starts `kvherd up` on free ports (real model), takes the time to the first token of a first chat, then sends a prompt of
about 1,500 tokens twice, several different ones, and prints TTFT of the second by the first. Nothing is asserted.
"""

import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "out" / "herd.json"
START_DEADLINE_S = 120.0
WORDS = ["river", "stone", "lantern", "orchard", "copper", "meadow", "violin", "harbor", "thunder", "pebble"]


@dataclass
class Figures:
    start_to_first_token_s: float
    first_ttft_s: list[float]
    second_ttft_s: list[float]
    cached_tokens: list[int]
    prompt_tokens: list[int]
    same_worker: list[bool]


@dataclass
class Answer:
    ttft_s: float
    worker: str
    prompt_tokens: int
    cached_tokens: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def chat(port: int, text: str) -> Answer:
    """One streamed chat; time to the first chunk with content."""
    body = json.dumps(
        {
            "model": "smollm2",
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 4,
            "temperature": 0,
        }
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"the chat answered {response.status}: {response.read().decode()}")
    ttft_s = 0.0
    usage: dict[str, Any] = {}
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if not ttft_s and any(choice["delta"].get("content") for choice in chunk["choices"]):
            ttft_s = time.perf_counter() - began
        usage = chunk.get("usage") or usage
    connection.close()
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(ttft_s, response.headers.get("x-kvherd-worker", ""), usage["prompt_tokens"], cached)


def wait_ready(port: int, began: float) -> None:
    while time.perf_counter() - began < START_DEADLINE_S:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"the herd was not ready within {START_DEADLINE_S:g} s")


def long_text(number: int) -> str:
    return f"Story {number}. " + " ".join(WORDS[(number + i * i) % len(WORDS)] for i in range(1150)) + " Sum up."


def measure(port: int, began: float) -> Figures:
    wait_ready(port, began)
    chat(port, "What is the capital of France?")
    figures = Figures(time.perf_counter() - began, [], [], [], [], [])
    for number in range(5):
        first, second = chat(port, long_text(number)), chat(port, long_text(number))
        figures.first_ttft_s.append(first.ttft_s)
        figures.second_ttft_s.append(second.ttft_s)
        figures.prompt_tokens.append(second.prompt_tokens)
        figures.cached_tokens.append(second.cached_tokens)
        figures.same_worker.append(first.worker == second.worker)
    return figures


def show(figures: Figures) -> None:
    ratios = [b / a for a, b in zip(figures.first_ttft_s, figures.second_ttft_s, strict=True)]
    print(f"kvherd up to first token         {figures.start_to_first_token_s:6.2f} s   (goal 10)")
    print(f"TTFT, prompt of {figures.prompt_tokens[0]} tokens      {statistics.median(figures.first_ttft_s):6.3f} s")
    print(f"TTFT of the same prompt again    {statistics.median(figures.second_ttft_s):6.3f} s")
    print(f"second by first, median and worst {statistics.median(ratios):.3f}x {max(ratios):.3f}x   (goal 0.1)")
    print(f"cached tokens {figures.cached_tokens}, same worker {sum(figures.same_worker)} of {len(ratios)}")


def main() -> None:
    port = free_port()
    command = [sys.executable, "-m", "kvherd.cli.main", "up", "--gateway-port", str(port)]
    began = time.perf_counter()
    herd = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    try:
        figures = measure(port, began)
    finally:
        herd.send_signal(signal.SIGINT)
        herd.wait(timeout=30)
    show(figures)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(asdict(figures) | {"cores": os.cpu_count()}, indent=1))


if __name__ == "__main__":
    main()
