"""What the gateway costs, beside nginx, SMG, vllm-router and sglang-router in the same run: `make bench-gateway`.

    python bench/gateway.py [--quick] [--rounds 5] [--seconds 2] [--only json,sse,kv,cores,grpc]

Two engines that cost little (bench/_engine.py), one load (bench/_load.py) and each gateway are separate processes; the
gateways have one core, engines and load the other, and in the cells of two cores everything shares both. Rounds are
interleaved, so that whatever else the machine does hits all alike. Prints the table with every ratio beside its goal,
writes bench/out/gateway.json and gateway.png. How to read it: docs/speed.md.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc_tokens
from _conversations import COUNT, conversations, name_of
from _figures import DIRECT, Cell, Measured, Results, table, write
from _gateways import ALL, Absent, Contender, Engines, Fleet, Running, engines, on, resident_mb, running

HERE = Path(__file__).parent
TICK_MS = 40.0
KB = 1024
JSON_CELLS = tuple(
    Cell(f"json-{size // KB}k-{count}", f"JSON {size // KB} KB, {count} connections", size, count)
    for size in (KB, 16 * KB)
    for count in (1, 64, 512)
)
SSE_CELLS = tuple(Cell(f"sse-{count}", f"SSE, {count} streams", KB, count, stream=True) for count in (64, 512))
KV_CELLS = tuple(
    Cell(f"kv-{size // KB}k-64", f"by cache, {size // KB} KB, 64 connections", size, 64, fresh=True)
    for size in (KB, 16 * KB)
)
CORES_CELLS = (Cell("cores-1k-64", "two cores, JSON 1 KB, 64 connections", KB, 64),)
PARTS = ("json", "sse", "kv", "cores", "grpc")


@dataclass(frozen=True, slots=True)
class Plan:
    rounds: int
    seconds: float
    warm_s: float
    only: frozenset[str]


class Bench:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._asked = 0
        cores = sorted(os.sched_getaffinity(0))
        self._both = frozenset(cores)
        self._first = frozenset(cores[:1])
        self._rest = frozenset(cores[1:] or cores)
        self.results = Results(settings={"rounds": plan.rounds, "seconds": plan.seconds, "cores": len(cores)})
        self._contenders = [one for one in ALL if self._there(one)]

    def _there(self, contender: Contender) -> bool:
        try:
            self.results.versions[contender.name] = contender.version()
        except Absent as absent:
            self.results.absent[contender.name] = str(absent)
            return False
        return True

    def run(self) -> Results:
        wanted = self._plan.only
        relayed = [*(JSON_CELLS if "json" in wanted else ()), *(SSE_CELLS if "sse" in wanted else ())]
        if relayed:
            with engines(self._rest, tick_ms=TICK_MS) as behind:
                self._section("round robin", relayed, behind, Fleet(behind.urls, self._first), memory=True)
        if "kv" in wanted:
            self._by_cache()
        if "cores" in wanted:
            with engines(self._both, tick_ms=TICK_MS) as behind:
                self._section("two cores", CORES_CELLS, behind, Fleet(behind.urls, self._both))
        if "grpc" in wanted:
            self._tokens()
        return self.results

    # --- cells ---------------------------------------------------------------------------------------------------

    def _section(
        self, title: str, cells: Sequence[Cell], behind: Engines, fleet: Fleet, *, memory: bool = False
    ) -> None:
        """Start every gateway that is there before these engines, and measure each cell in rounds."""
        self.results.cells += cells
        with ExitStack() as stack:
            gateways = self._start(stack, title, fleet)
            if memory:
                time.sleep(1.0)
                for one in gateways:
                    self.results.memory_mb[one.name] = {"idle": resident_mb(one.pids)}
            for number in range(self._plan.rounds):
                say(f"{title}: round {number + 1} of {self._plan.rounds}")
                for cell in cells:
                    self._measure(cell, None, behind, fleet, number)
                    for one in gateways:
                        self._measure(cell, one, behind, fleet, number)
            for one in gateways if memory else ():
                sizes = self.results.memory_mb[one.name]
                sizes |= {"loaded": resident_mb(one.pids), "highest": resident_mb(one.pids, peak=True)}

    def _start(self, stack: ExitStack, title: str, fleet: Fleet) -> list[Running]:
        gateways = []
        for contender in self._contenders:
            if fleet.by_cache and contender.name == "nginx":
                continue  # it knows no caches
            try:
                gateways.append(stack.enter_context(running(contender, fleet)))
            except Absent as absent:
                self.results.failed[f"{contender.name}, {title}"] = str(absent)
        return gateways

    def _measure(self, cell: Cell, gateway: Running | None, behind: Engines, fleet: Fleet, number: int) -> None:
        name = gateway.name if gateway else DIRECT
        ports = [gateway.port] if gateway else behind.ports
        found = self._load(cell, ports, {"gateway": gateway.pids if gateway else [], "engine": [behind.pid]}, fleet)
        if "failed" in found:
            self.results.failed[f"{name}, {cell.title}"] = found["failed"]
            return
        took_s, used_s = found["seconds"], found["cpu_s"]
        units = found["events"] if cell.stream else found["answers"]
        self.results.measured.append(
            Measured(
                cell=cell.key,
                contender=name,
                round=number,
                cpu_us=used_s["gateway"] / units * 1e6,
                per_s=units / took_s,
                p50_ms=found["p50_ms"],
                p99_ms=found["p99_ms"],
                busy=used_s["gateway"] / took_s / len(fleet.cores),
                load_busy=used_s["load"] / took_s,
                engine_busy=used_s["engine"] / took_s,
                others=found["others_s"] / took_s / (os.cpu_count() or 1),
            )
        )

    def _load(self, cell: Cell, ports: list[int], watched: dict[str, list[int]], fleet: Fleet) -> dict[str, Any]:
        words = ["--connections", cell.connections, "--size", cell.size, "--warm", self._plan.warm_s]
        words += ["--seconds", self._plan.seconds, "--first-number", self._asked, "--ports", *ports]
        words += ["--stream"] * cell.stream + ["--fresh"] * cell.fresh
        words += ["--max-tokens", cell.max_tokens] if cell.max_tokens else []
        words += [f"--watch={name}={','.join(map(str, pids))}" for name, pids in watched.items()]
        self._asked = (self._asked + 1_000_000) % 90_000_000
        cores = self._both if fleet.cores == self._both else self._rest
        command = [sys.executable, str(HERE / "_load.py"), *map(str, words)]
        limit_s = self._plan.seconds + self._plan.warm_s + 60
        with on(cores):
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
        if done.returncode:
            return {"failed": f"the load said {done.stderr.strip()[-300:]}"}
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def _by_cache(self) -> None:
        """Engines that publish what they hold, and gateways that choose by it. The sizes have fleets of their own: what
        a conversation is called is what tells it, in both.
        """
        for cell in KV_CELLS:
            with tempfile.TemporaryDirectory() as folder:
                directory = Path(folder, "model")
                events = Path(folder, "chats.json")
                events.write_text(json.dumps(tokenized(cell.size, directory)))
                with engines(self._rest, tick_ms=TICK_MS, events=events) as behind:
                    fleet = Fleet(behind.urls, self._first, behind.live, behind.replay, directory)
                    self._section(cell.title, [cell], behind, fleet)

    def _tokens(self) -> None:
        """CPU of our reader of gRPC workers, beside grpc.aio reading the same stream and making no text of it."""
        say("tokens of gRPC workers")
        options = argparse.Namespace(streams=64, tokens=60 if self._plan.rounds < 3 else 200)
        taken: dict[str, list[float]] = {name: [] for name in grpc_tokens.CONTENDERS}
        with on(self._rest), grpc_tokens.engine() as target, on(self._first):
            for _ in range(self._plan.rounds):
                for name, times in taken.items():
                    times.append(grpc_tokens.figure(name, target, options)["us"])
        self.results.extra["grpc_tokens"] = {
            name: {"us_a_message": sorted(times)[len(times) // 2], "all": times} for name, times in taken.items()
        }


def tokenized(size: int, directory: Path) -> dict[str, dict[str, object]]:
    """What engines know of each conversation, in tokens of the real model, whose tokenizer goes into `directory`."""
    from kvherd.adapters.model_files import locate  # noqa: PLC0415 - only this part needs a model
    from kvherd.adapters.tokenizer import load_tokenizer  # noqa: PLC0415
    from kvherd.wire.openai.prompts import decode_chat_prompt  # noqa: PLC0415

    tokenizer = load_tokenizer(locate("smollm2"))
    with zipfile.ZipFile(io.BytesIO(tokenizer.artifact_zip())) as archive:
        archive.extractall(directory)
    chats: dict[str, dict[str, object]] = {}
    for number, chat in enumerate(conversations(size)):
        call = decode_chat_prompt(chat.body)
        assert call is not None
        text = tokenizer.render_chat(call)
        known = text[: text.rindex("Question ")]
        known = known[: known.rindex("<|im_start|>")]
        tokens = {"known": tokenizer.encode(known), "prompt_tokens": len(tokenizer.encode(text))}
        chats[name_of(number)] = tokens
    assert len(chats) == COUNT
    return chats


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under three minutes: 1 round of 0.6 s a cell")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    options = parser.parse_args()
    only = frozenset(options.only.split(","))
    if unknown := only - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    plan = Plan(1, 0.6, 0.3, only) if options.quick else Plan(options.rounds, options.seconds, 0.5, only)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    results = Bench(plan).run()
    for line in table(results):
        print(line)
    for path in write(results, HERE / "out"):
        print(f"written: {path.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
