"""Time to the first token with and without late binding, over virtual time.

    .venv/bin/python bench/late_binding.py [--trace FILE] [--requests 1500] [--workers 4] [--tokens-per-s 8000]
                                           [--slots 0] [--untold]

The gateway's own roster, policy `kv`, admission and waiting line choose; the workers are models: each computes one
prompt after the other in the order in which they came, at a fixed rate, keeps the blocks of the last prompts, and
decodes beside that at no cost. With `--slots` each has so many requests at a time, from before their prefill to their
last token, and the others wait; `--untold`: the gateway does not know how many. `--trace` is a file of Mooncake's kind
(lines of JSON with timestamp, input_length, output_length and hash_ids of blocks of 512 tokens); without it a trace of
that shape is made: conversations that go on, with lengths that differ by orders of magnitude. The trace is played at
several speeds, so that the workers have so much of their time to compute, or so much of their slots in use. Prints a
table, writes bench/out/late_binding.json.
"""

import argparse
import asyncio
import json
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, quantiles

from kvherd.core.fleet.roster import Member, Roster
from kvherd.core.ids import RequestId, WorkerId
from kvherd.core.routing.candidate import Ask, KvKnowledge
from kvherd.core.routing.late import LateBounds, least_prefill_s
from kvherd.core.routing.policy import Explanation, make_policy
from kvherd.services.gateway.settings import AdmissionBounds
from kvherd.services.gateway.waiting.admission import Admission, Gate
from kvherd.testing.virtual_time import virtual_time

OUT = Path(__file__).parent / "out" / "late_binding.json"
BLOCK = 512
TOKEN_S = 0.03
"""Of output."""
SPEEDS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
"""Of what the workers could compute at the most, were nothing cached twice."""


@dataclass(frozen=True, slots=True)
class Asked:
    at_s: float
    tokens: int
    output: int
    blocks: tuple[int, ...]


def read_trace(path: Path, requests: int) -> list[Asked]:
    with path.open() as lines:
        told = [json.loads(line) for line, _ in zip(lines, range(requests), strict=False)]
    return [
        Asked(one["timestamp"] / 1000, one["input_length"], one["output_length"], tuple(one["hash_ids"]))
        for one in told
    ]


def make_trace(requests: int, seed: int = 1) -> list[Asked]:
    """Conversations: of each the next prompt is the one before and something new, of log-normal length."""
    dice, at_s, blocks, trace = random.Random(seed), 0.0, 0, []
    talks: list[tuple[int, ...]] = []
    for _ in range(requests):
        at_s += dice.expovariate(3.4)
        said = talks.pop(dice.randrange(len(talks))) if talks and dice.random() < 0.6 else ()
        new = max(1, int(dice.lognormvariate(2.0, 1.2)))
        said = (*said, *range(blocks, blocks + new))
        blocks += new
        if len(said) < 250:
            talks.append(said)
        trace.append(Asked(at_s, len(said) * BLOCK - dice.randrange(BLOCK), int(dice.expovariate(1 / 340)) + 1, said))
    return trace


@dataclass
class Engine:
    """Computes prompts in the order in which they come, and keeps the blocks of the last ones."""

    member: Member
    tokens_per_s: float
    room: int
    slots: int
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    computed: int = 0
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.slot = asyncio.Semaphore(self.slots or 1_000_000)

    def cached(self, asked: Asked) -> int:
        held = 0
        for block in asked.blocks:
            if block not in self.blocks:
                break
            held += 1
        return min(held * BLOCK, asked.tokens - 1)

    async def prefill(self, asked: Asked) -> int:
        """Answers how many tokens it had to compute."""
        async with self.turn:
            cached = self.cached(asked)
            tokens = asked.tokens - cached
            self.cached_tokens += cached
            await asyncio.sleep(tokens / self.tokens_per_s)
            for block in asked.blocks:
                self.blocks[block] = None
                self.blocks.move_to_end(block)
            while len(self.blocks) > self.room:
                self.blocks.popitem(last=False)
        self.computed += tokens
        return tokens


@dataclass(frozen=True)
class Workers:
    number: int
    tokens_per_s: float
    room: int
    slots: int = 0
    told: bool = True


class Herd:
    """A gateway's choices over such engines."""

    def __init__(self, workers: Workers, bounds: LateBounds) -> None:
        self.roster, self.policy, self.bounds = Roster(), make_policy("kv"), bounds
        self.engines = {}
        for number in range(workers.number):
            told = workers.slots if workers.told else 0
            name = WorkerId(f"grpc://{number}:1")
            member = Member(name, detected=True, models=("m",), block_size=BLOCK, max_running=told)
            self.roster.join(member)
            self.roster.prefilled(member, 100_000, 100_000 / workers.tokens_per_s, 0.0)
            self.engines[member.worker] = Engine(member, workers.tokens_per_s, workers.room, workers.slots)
        self.admission = Admission(AdmissionBounds(running=100_000, waiting=100_000))
        self.clock = asyncio.get_running_loop().time
        self.gate = Gate(lambda: self.roster.room_in_s("m", bounds.backlog_s, self.clock()))
        self.gate.line.ageing = bounds.ageing
        self.coming: dict[WorkerId, dict[int, int]] = {worker: {} for worker in self.engines}
        self.dice = random.Random(1).random
        self.ttft_s: list[float] = []
        self.held_s: list[float] = []

    async def serve(self, number: int, asked: Asked) -> None:
        began_s = self.clock()
        await self.admission.enter("")
        explanation = self._choose(asked)
        if self.bounds.on and (len(self.gate.line) or self.gate.room_in_s() > 0.0):
            cost_s = least_prefill_s(explanation, asked.tokens)
            await self.admission.hold(self.gate, "", cost_s=cost_s, longest_s=self.bounds.longest_s)
            explanation = self._choose(asked)
        self.held_s.append(self.clock() - began_s)
        assert explanation.chosen is not None
        engine = self.engines[explanation.chosen.worker]
        request = RequestId(str(number))
        await self._send(engine, request, asked, asked.tokens - explanation.chosen.matched_tokens)
        self.ttft_s.append(self.clock() - began_s)
        await asyncio.sleep(asked.output * TOKEN_S)
        engine.slot.release()
        member, now_s = engine.member, self.clock()
        member.served(member.in_flight[request], now_s=now_s)
        member.end(request, now_s=now_s)
        self.admission.leave()
        self.admission.look()

    def _choose(self, asked: Asked) -> Explanation:
        now_s = self.clock()
        candidates = [
            engine.member.candidate(
                now_s, matched_tokens=self._matched(engine, asked), prompt_tokens=asked.tokens, kv=KvKnowledge.KNOWN
            )
            for engine in self.engines.values()
        ]
        return self.policy.choose(Ask("m", asked.tokens), candidates, self.dice)

    def _matched(self, engine: Engine, asked: Asked) -> int:
        """What it holds, and what is on its way there."""
        coming, held = self.coming[engine.member.worker], 0
        for block in asked.blocks:
            if block not in engine.blocks and block not in coming:
                break
            held += 1
        return min(held * BLOCK, asked.tokens - 1)

    async def _send(self, engine: Engine, request: RequestId, asked: Asked, uncached: int) -> None:
        member, sent_s, coming = engine.member, self.clock(), self.coming[engine.member.worker]
        ahead = member.begin(request, prompt_tokens=asked.tokens, uncached_tokens=uncached, now_s=sent_s)
        for block in asked.blocks:
            coming[block] = coming.get(block, 0) + 1
        await engine.slot.acquire()
        computed = await engine.prefill(asked)
        for block in asked.blocks:
            coming[block] -= 1
            if not coming[block]:
                del coming[block]
        member.answered(request, now_s=self.clock())
        if not member.in_flight[request].queued:
            self.roster.prefilled(member, int(ahead - uncached + computed), self.clock() - sent_s, self.clock())
        self.admission.look()


async def play(trace: list[Asked], speed: float, workers: Workers, bounds: LateBounds) -> Herd:
    herd = Herd(workers, bounds)
    async with asyncio.TaskGroup() as group:
        for number, asked in enumerate(trace):
            await asyncio.sleep(max(0.0, asked.at_s / speed - herd.clock()))
            group.create_task(herd.serve(number, asked))
    return herd


def usual_speed(trace: list[Asked], workers: Workers) -> float:
    """At which the workers would be busy all the time, or all their slots, if each block were computed once."""
    seen: set[int] = set()
    tokens = 0
    for asked in trace:
        held = 0
        while held < len(asked.blocks) and asked.blocks[held] in seen:
            held += 1
        tokens += asked.tokens - min(held * BLOCK, asked.tokens - 1)
        seen.update(asked.blocks)
    computing_s = tokens / workers.tokens_per_s
    slots_s = sum(asked.output for asked in trace) * TOKEN_S + computing_s
    busy_s = max(computing_s, slots_s / workers.slots if workers.slots else 0.0)
    return workers.number * trace[-1].at_s / busy_s


def figures(herd: Herd) -> dict[str, float]:
    cuts = quantiles(herd.ttft_s, n=100)
    return {
        "mean_s": mean(herd.ttft_s),
        "p50_s": cuts[49],
        "p90_s": cuts[89],
        "p99_s": cuts[98],
        "longest_s": max(herd.ttft_s),
        "held_share": sum(held > 0 for held in herd.held_s) / len(herd.held_s),
        "hit_rate": sum(engine.cached_tokens for engine in herd.engines.values())
        / sum(engine.cached_tokens + engine.computed for engine in herd.engines.values()),
        "computed_tokens": sum(engine.computed for engine in herd.engines.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tokens-per-s", type=float, default=8000.0)
    parser.add_argument("--room", type=int, default=4000, help="blocks of 512 tokens that each worker keeps")
    parser.add_argument("--slots", type=int, default=0, help="requests that each worker computes at a time; 0: any")
    parser.add_argument("--untold", action="store_true", help="the gateway does not know of the slots")
    parser.add_argument("--longest-s", type=float, nargs="+", default=[LateBounds().longest_s])
    parser.add_argument("--ageing", type=float, nargs="+", default=[LateBounds().ageing])
    args = parser.parse_args()
    trace = read_trace(args.trace, args.requests) if args.trace else make_trace(args.requests)
    workers = Workers(args.workers, args.tokens_per_s, args.room, args.slots, told=not args.untold)
    usual = usual_speed(trace, workers)
    ways = [
        LateBounds(0.0),
        *(LateBounds(longest_s=held, ageing=age) for held in args.longest_s for age in args.ageing),
    ]
    rows = []
    print(f"{len(trace)} requests, {args.workers} workers of {args.tokens_per_s:g} tokens/s")
    print("load  late binding              mean     p50     p90     p99  longest   held  Mtokens  hits")
    for speed in SPEEDS:
        for bounds in ways:
            played = play(trace, usual * speed, workers, bounds)
            row = figures(virtual_time(played))
            name = f"{bounds.backlog_s:g} s, {bounds.longest_s:g} s, ageing {bounds.ageing:g}" if bounds.on else "none"
            rows.append({"load": speed, "late_binding": name, **row})
            times = " ".join(f"{row[key]:7.2f}" for key in ("mean_s", "p50_s", "p90_s", "p99_s", "longest_s"))
            print(
                f"{speed:4.1f}  {name:22}{times}  {row['held_share']:5.0%}  {row['computed_tokens'] / 1e6:7.1f}"
                f"  {row['hit_rate']:.1%}",
                flush=True,
            )
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
