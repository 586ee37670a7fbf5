"""What a step of the embedded engine costs beside its arithmetic: planning, telling, threads and sockets.

    python bench/engine_steps.py [--models tiny smollm2] [--steps 96] [--rounds 3]

Three contenders decode the same greedy batch behind the same context, in turns, so that each meets the same noise:

bare      a loop around the model: the same rows, sampled, and nothing else
planned   the scheduler around the same loop, in one thread: what planning costs, as a share of the step
rank      a whole rank process over its sockets, as a servicer drives it

Printed are steps a second, medians of the rounds, and each one's ratio to `bare`. Nothing is asserted.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

from kvherd.adapters.model_files import locate
from kvherd.core.engine.generation import GenerationRequest, Limits, Sampling
from kvherd.core.ids import Rank, RequestId
from kvherd.core.scheduler.scheduler import Scheduler
from kvherd.core.scheduler.steps import SchedulerLimits
from kvherd.runtime.batch import ForwardBatch, SamplingState, SequenceRows
from kvherd.runtime.blas_threads import BlasThreads
from kvherd.runtime.engine_model import EngineModel, load_engine_model
from kvherd.runtime.step_thread import run_step
from kvherd.services.engine.rank_plan import ipc_directory, rank_configs
from kvherd.services.engine.ranks import RankProcesses
from kvherd.testing.rank_client import RankClient

OUT = Path(__file__).resolve().parent / "out" / "engine_steps.json"
BATCHES = (1, 8)
CONTEXT, BLOCK, POOL_BLOCKS = 64, 16, 512
GREEDY = Sampling(temperature=0.0)


def prompt(row: int) -> list[int]:
    """A prompt of its own for each row: nothing is found in the cache."""
    return [5 + (row * CONTEXT + index) * 7919 % 200 for index in range(CONTEXT)]


def bare(model: EngineModel, batch: int, steps: int) -> float:
    """Seconds a step."""
    tables = [range(row * 32, row * 32 + 32) for row in range(batch)]
    last = [prompt(row)[-1] for row in range(batch)]
    begun_s = time.perf_counter()
    for step in range(steps):
        position = CONTEXT + step
        rows = [SequenceRows([last[row]], position, tables[row][: position // BLOCK + 1]) for row in range(batch)]
        last = [one.token_id for one in model.step(ForwardBatch(rows), [SamplingState(GREEDY, position + 1)] * batch)]
    return (time.perf_counter() - begun_s) / steps


def planned(model: EngineModel, batch: int, steps: int) -> tuple[float, float]:
    """Seconds a step, and those of them that the scheduler took. Steps that read a prompt do not count."""
    scheduler = Scheduler(Rank(0), SchedulerLimits(POOL_BLOCKS, model.facts.vocab_size, model.facts.max_context_tokens))
    for row in range(batch):
        request = GenerationRequest(RequestId(str(row)), prompt(row), Limits(steps + 1, ignore_eos=True), GREEDY)
        scheduler.submit(request, time.monotonic())
    whole_s = own_s = 0.0
    while True:
        begun_s = time.perf_counter()
        plan = scheduler.plan_step()
        if plan is None:
            return whole_s / steps, own_s / steps
        planned_s = time.perf_counter()
        choices = run_step(model, plan)
        stepped_s = time.perf_counter()
        scheduler.complete_step(choices, time.monotonic())
        scheduler.load(time.monotonic())  # told after every step
        ended_s = time.perf_counter()
        if all(len(row.token_ids) == 1 for row in plan.rows):
            whole_s += ended_s - begun_s
            own_s += ended_s - stepped_s + planned_s - begun_s


async def in_process(client: RankClient, name: str, batch: int, steps: int) -> float:
    """Seconds a step, from the first token of the last request to the last one's end."""
    client.heard.clear()
    for row in range(batch):
        await client.submit(f"{name}-{row}", prompt(row), steps + 1)
    for row in range(batch):
        await client.started(f"{name}-{row}")
    client.heard.clear()
    begun_s, at = time.perf_counter(), (await client.load(f"{name}-begun")).steps_total
    for row in range(batch):
        await client.end(f"{name}-{row}")
    ended_s, steps_done = time.perf_counter(), (await client.load(f"{name}-ended")).steps_total - at
    await client.flush(f"{name}-flush")
    await client.answer(f"{name}-flush")
    return (ended_s - begun_s) / steps_done


async def rank(model: str, batch: int, steps: int) -> float:
    with ipc_directory() as directory:
        configs = rank_configs(model, ranks=1, port=0, ipc_dir=directory, pool_blocks=POOL_BLOCKS)
        async with RankClient(directory) as client, RankProcesses(configs, on_exit=lambda *_: None):
            await client.until(lambda: client.heard or None, deadline_s=60)
            await in_process(client, "warm", batch, 8)
            return await in_process(client, "timed", batch, steps)


def measure(name: str, batch: int, steps: int, rounds: int) -> dict[str, float]:
    path = locate(name).path
    source = "tiny" if path is None else str(path)
    model = load_engine_model(source, pool_blocks=POOL_BLOCKS)
    bare(model, batch, 8)
    threads = BlasThreads()
    taken: dict[str, list[float]] = {"bare": [], "planned": [], "rank": []}
    shares = []
    for _ in range(rounds):
        with threads.single():  # as a rank is started
            taken["bare"].append(bare(model, batch, steps))
            step_s, own_s = planned(model, batch, steps)
        taken["planned"].append(step_s)
        shares.append(own_s / step_s)
        taken["rank"].append(asyncio.run(rank(source, batch, steps)))
    found: dict[str, float] = {}
    for contender, times in taken.items():
        found[f"{contender}_steps_per_s"] = 1 / statistics.median(times)
        pairs = zip(times, taken["bare"], strict=True)
        found[f"{contender}_to_bare"] = statistics.median(base / own for own, base in pairs)
    return found | {"scheduler_share": statistics.median(shares)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "smollm2"])
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results = {
        name: {batch: measure(name, batch, arguments.steps, arguments.rounds) for batch in BATCHES}
        for name in arguments.models
    }
    for name, by_batch in results.items():
        for batch, found in by_batch.items():
            speeds = "  ".join(
                f"{one} {found[f'{one}_steps_per_s']:8.1f}/s ({found[f'{one}_to_bare']:.3f})"
                for one in ("bare", "planned", "rank")
            )
            print(f"{name:8} batch {batch}: {speeds}  the scheduler's share {found['scheduler_share']:.2%}")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
