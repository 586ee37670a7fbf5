"""What orders to the embedded engine cost: flushes when idle, flushes that expire under load, a profile that is on.

    python bench/engine_orders.py [--model smollm2] [--flushes 100] [--rounds 3]

All over HTTP on this machine, as an operator gives them, against one engine in one run:

idle     from the call to the answer of a flush that finds one prompt cached
expiry   how far from its time a flush ends that finds the engine busy from beginning to end; the load is made by a
         process of its own, and in turns with the flushes a sleep of the same length is timed in the same process:
         what it is late by is the machine's part
profile  time of the same answers with a profile off, on, and on with stacks, in turns; the ratios are what to trust

Nothing is asserted.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from kvherd.testing.herds import begin_engine
from kvherd.testing.processes import KvherdProcess

OUT = Path(__file__).resolve().parent / "out" / "engine_orders.json"
CLIENTS = 6
CONTENDERS = {"off": None, "on": {}, "on, with stacks": {"with_stack": True}}


def milliseconds(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, round(len(ordered) * 0.99))]
    return {"p50_ms": statistics.median(ordered) * 1000, "p99_ms": p99 * 1000, "most_ms": ordered[-1] * 1000}


class Bench:
    def __init__(self, url: str, sidecar_url: str, model: str, flushes: int = 0, rounds: int = 0) -> None:
        self._model = model
        self._flushes = flushes
        self._rounds = rounds
        self._http = httpx.Client(base_url=url, timeout=120)
        self._sidecar = httpx.Client(base_url=sidecar_url, timeout=120)
        self._dice = random.Random(1)

    def generate(self, tokens: int) -> None:
        prompt = " ".join(str(self._dice.randrange(1000)) for _ in range(12))
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        self._http.post("/v1/completions", json=body).raise_for_status()

    def idle(self) -> list[float]:
        taken = []
        for _ in range(self._flushes):
            self.generate(1)
            begun_s = time.perf_counter()
            self._sidecar.post("/flush_cache").raise_for_status()
            taken.append(time.perf_counter() - begun_s)
        return taken

    def keep_busy(self) -> None:
        """Until standard input ends."""
        done = threading.Event()

        def ask(tokens: int) -> None:
            while not done.is_set():
                self.generate(tokens)

        with ThreadPoolExecutor(CLIENTS) as pool:  # of different lengths, or they would all end with one step
            for index in range(CLIENTS):
                pool.submit(ask, 40 + 23 * index)
            sys.stdin.read()
            done.set()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Ask for answers all the time, in another process: threads in this one would make its clock late."""
        command = [sys.executable, __file__, "--model", self._model, "--load", str(self._http.base_url)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as load:
            try:
                time.sleep(3)
                yield
            finally:
                load.communicate()

    def expiry(self) -> tuple[list[float], list[float]]:
        """How late flushes ended, and sleeps."""
        flushes, sleeps = [], []
        with self.busy():
            for _ in range(self._flushes):
                time_s = self._dice.uniform(0.02, 0.2)
                begun_s = time.perf_counter()
                answer = self._sidecar.post(f"/flush_cache?timeout={time_s}")
                if answer.json()["timed_out"]:
                    flushes.append(abs(time.perf_counter() - begun_s - time_s))
                begun_s = time.perf_counter()
                time.sleep(time_s)
                sleeps.append(time.perf_counter() - begun_s - time_s)
        return flushes, sleeps

    def profile(self, directory: str) -> dict[str, list[float]]:
        taken: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for _ in range(self._rounds):
            for name, options in CONTENDERS.items():
                if options is not None:
                    body = {"output_dir": directory} | options
                    self._sidecar.post("/start_profile", json=body).raise_for_status()
                begun_s = time.perf_counter()
                for _ in range(2):
                    self.generate(48)
                taken[name].append(time.perf_counter() - begun_s)
                if options is not None:
                    self._sidecar.post("/stop_profile").raise_for_status()
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--flushes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        Bench(arguments.load, arguments.load, arguments.model).keep_busy()
        return
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        engine = begin_engine(
            lambda *words: stack.enter_context(KvherdProcess(*words)),
            "--model", arguments.model, "--served-model-name", "bench",
        )  # fmt: skip
        bench = Bench(engine.url, engine.sidecar_url, "bench", arguments.flushes, arguments.rounds)
        bench.generate(8)
        idle = milliseconds(bench.idle())
        expiry, sleep = (milliseconds(errors) for errors in bench.expiry())
        taken = bench.profile(directory)
    ratios = {
        name: statistics.median(on / off for on, off in zip(times, taken["off"], strict=True))
        for name, times in taken.items()
    }
    result = {"model": arguments.model, "idle": idle, "expiry": expiry, "sleep beside": sleep, "profile": ratios}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
