"""What every scheduler behind a servicer must do, whatever it is made of.

A suite of it derives from `SchedulerContract` and says how to open one; a token takes it some milliseconds at least,
so that a long answer is still under way when the next line of a test runs. A short one need not be: who reads late, as
a test does on a machine with other work, finds all of it in one delta.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import cast

import pytest

from kvherd.core.engine.generation import FinishReason, GenerationRequest, Limits, Sampling, TokenDelta
from kvherd.core.engine.profile import ProfileRequest
from kvherd.core.errors import RequestDuplicate
from kvherd.core.ids import RequestId
from kvherd.ports.scheduler import Scheduler
from kvherd.testing.patience import until

PROMPT = list(range(97, 97 + 20)) * 3
LONG = 400


def asked(name: str, *, tokens: int = 4, prompt: list[int] | None = None) -> GenerationRequest:
    return GenerationRequest(
        RequestId(name),
        PROMPT if prompt is None else prompt,
        Limits(tokens, ignore_eos=True),
        Sampling(temperature=0.0),
    )


def deltas_of(scheduler: Scheduler, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
    return cast(AsyncGenerator[TokenDelta, None], scheduler.generate(request))


async def read_all(scheduler: Scheduler, request: GenerationRequest) -> list[TokenDelta]:
    async with aclosing(deltas_of(scheduler, request)) as deltas:
        return [delta async for delta in deltas]


async def running_becomes(scheduler: Scheduler, running: int) -> None:
    async with asyncio.timeout(30):
        while True:
            report = await scheduler.state()
            if sum(answer.load.running + answer.load.waiting for answer in report.answers if answer.load) == running:
                return
            await asyncio.sleep(0.01)


async def orders_become(scheduler: Scheduler, count: int) -> None:
    """Once they are open they are on their way: what is asked next is heard later."""
    await until(lambda: scheduler.open_orders == count)


class SchedulerContract:
    def opened(self) -> AbstractAsyncContextManager[Scheduler]:
        raise NotImplementedError

    async def test_an_answer_comes_in_order_and_ends_once(self) -> None:
        async with self.opened() as scheduler:
            deltas = await read_all(scheduler, asked("a", tokens=6))
        assert sum(len(delta.token_ids) for delta in deltas) == 6
        said = 0
        for delta in deltas:
            said += len(delta.token_ids)
            assert delta.completion_tokens == said
            assert delta.prompt_tokens == len(PROMPT)
        assert [delta.finish.reason for delta in deltas if delta.finish] == [FinishReason.LENGTH]
        assert deltas[-1].finish is not None

    async def test_the_same_greedy_question_gets_the_same_answer_from_the_cache(self) -> None:
        async with self.opened() as scheduler:
            first = await read_all(scheduler, asked("a", tokens=6))
            again = await read_all(scheduler, asked("a", tokens=6))
        assert [t for d in again for t in d.token_ids] == [t for d in first for t in d.token_ids]
        assert first[-1].cached_tokens == 0
        assert again[-1].cached_tokens == 48  # of 60 tokens, three whole blocks of 16

    async def test_a_second_request_of_a_live_id_is_refused_and_the_first_goes_on(self) -> None:
        async with self.opened() as scheduler, aclosing(deltas_of(scheduler, asked("a", tokens=LONG))) as first:
            await anext(first)
            with pytest.raises(RequestDuplicate):
                await read_all(scheduler, asked("a"))
            rest = [delta async for delta in first]
            assert rest[-1].completion_tokens == LONG

    async def test_an_id_may_be_used_again_as_soon_as_its_reader_left(self) -> None:
        async with self.opened() as scheduler:
            async with aclosing(deltas_of(scheduler, asked("a", tokens=LONG))) as first:
                await anext(first)
            again = await read_all(scheduler, asked("a", tokens=3))
        assert again[-1].finish is not None
        assert again[-1].finish.reason is FinishReason.LENGTH
        assert again[-1].completion_tokens == 3

    async def test_an_id_may_be_used_again_by_whoever_holds_the_last_news_of_it(self) -> None:
        async with self.opened() as scheduler, aclosing(deltas_of(scheduler, asked("a", tokens=2))) as first:
            async for delta in first:
                if delta.finish is not None:
                    again = await read_all(scheduler, asked("a", tokens=3))
        assert again[-1].completion_tokens == 3

    async def test_a_reader_that_leaves_ends_the_request_in_the_scheduler(self) -> None:
        async with self.opened() as scheduler:
            async with aclosing(deltas_of(scheduler, asked("a", tokens=LONG))) as first:
                await anext(first)
                await running_becomes(scheduler, 1)
            await running_becomes(scheduler, 0)

    async def test_an_abort_ends_the_stream_at_once_with_its_reason(self) -> None:
        async with self.opened() as scheduler, aclosing(deltas_of(scheduler, asked("a", tokens=LONG))) as deltas:
            await anext(deltas)
            assert await scheduler.abort(RequestId("a"), reason="no longer wanted")
            last = [delta async for delta in deltas][-1]
            assert last.finish is not None
            assert last.finish.reason is FinishReason.ABORT
            assert last.finish.message == "no longer wanted"
            assert 1 <= last.completion_tokens < LONG
            await running_becomes(scheduler, 0)

    async def test_an_abort_of_nobody_says_so(self) -> None:
        async with self.opened() as scheduler:
            assert not await scheduler.abort(RequestId("nobody"))
            await read_all(scheduler, asked("a"))
            assert not await scheduler.abort(RequestId("a"))

    async def test_an_idle_flush_is_done_and_forgets_the_cache(self) -> None:
        async with self.opened() as scheduler:
            await read_all(scheduler, asked("a"))
            report = await scheduler.flush(timeout_s=0.0)
            assert report.done
            assert len(report.answers) == len(scheduler.ranks)
            again = await read_all(scheduler, asked("b"))
            assert again[-1].cached_tokens == 0

    async def test_a_flush_that_may_not_wait_is_refused_and_says_what_is_busy(self) -> None:
        async with self.opened() as scheduler, aclosing(deltas_of(scheduler, asked("a", tokens=LONG))) as deltas:
            await anext(deltas)
            report = await scheduler.flush(timeout_s=0.0)
            assert not report.done
            assert not report.silent
            refusal = next(answer for answer in report.answers if not answer.done)
            assert {blocker.kind: blocker.count for blocker in refusal.blockers} == {"running": 1}
            assert not refusal.timed_out
            assert refusal.message

    async def test_a_flush_that_waits_too_long_says_that_it_timed_out(self) -> None:
        async with self.opened() as scheduler, aclosing(deltas_of(scheduler, asked("a", tokens=LONG))) as deltas:
            await anext(deltas)
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            report = await scheduler.flush(timeout_s=0.1)
            assert not report.done
            assert any(answer.timed_out for answer in report.answers)
            assert 0.09 <= loop.time() - began_s < 10.0

    async def test_a_flush_waits_for_what_is_running(self) -> None:
        async with self.opened() as scheduler, aclosing(deltas_of(scheduler, asked("a", tokens=LONG))) as deltas:
            await anext(deltas)
            async with asyncio.TaskGroup() as group:
                flush = group.create_task(scheduler.flush(timeout_s=60.0))
                assert [delta async for delta in deltas][-1].completion_tokens == LONG
            assert flush.result().done

    async def test_orders_of_two_kinds_do_not_wait_for_each_other(self) -> None:
        async with self.opened() as scheduler, aclosing(deltas_of(scheduler, asked("a", tokens=LONG))) as deltas:
            await anext(deltas)
            async with asyncio.TaskGroup() as group:
                flush = group.create_task(scheduler.flush(timeout_s=0.5))
                report = await scheduler.state()
                assert report.done
                assert not flush.done()

    async def test_the_state_tells_of_every_rank_at_this_moment(self) -> None:
        async with self.opened() as scheduler:
            report = await scheduler.state()
            assert [answer.rank for answer in report.answers] == [facts.rank for facts in scheduler.ranks]
            assert all(answer.load is not None and answer.load.running == 0 for answer in report.answers)
            assert len(scheduler.loads) == len(scheduler.ranks)

    async def test_a_flush_whose_caller_left_holds_nobody_back_and_clears_nothing(self) -> None:
        async with self.opened() as scheduler:
            async with aclosing(deltas_of(scheduler, asked("a", tokens=LONG))) as deltas:
                await anext(deltas)
                flush = asyncio.ensure_future(scheduler.flush(timeout_s=60.0, hold=True))
                await orders_become(scheduler, 1)
                flush.cancel()
                await asyncio.wait([flush])
                assert flush.cancelled()
                other = [97 + n % 20 for n in range(64)]
                async with asyncio.timeout(30):
                    assert (await read_all(scheduler, asked("b", prompt=other)))[-1].completion_tokens == 4
            await running_becomes(scheduler, 0)
            assert (await read_all(scheduler, asked("c", prompt=other)))[-1].cached_tokens == 48
            assert scheduler.open_orders == 0

    async def test_a_profile_is_on_until_it_is_stopped_and_there_is_only_one(self, tmp_path: Path) -> None:
        async with self.opened() as scheduler:
            begun = await scheduler.start_profile(ProfileRequest("profile-1", str(tmp_path)), timeout_s=10)
            assert begun.done
            second = await scheduler.start_profile(ProfileRequest("profile-2", str(tmp_path)), timeout_s=10)
            assert not second.done
            assert all(answer.conflict for answer in second.answers)
            await read_all(scheduler, asked("a"))
            ended = await scheduler.stop_profile(timeout_s=10)
            assert ended.done
            assert [len(answer.files) for answer in ended.answers] == [1] * len(scheduler.ranks)
            again = await scheduler.stop_profile(timeout_s=10)
            assert not again.done
            assert all(answer.conflict for answer in again.answers)
