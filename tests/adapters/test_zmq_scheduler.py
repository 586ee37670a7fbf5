"""The ZMQ scheduler against ranks that do exactly what a test says."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from kvherd.adapters.zmq_scheduler import ORDER_GRACE_S, ZmqScheduler
from kvherd.core.engine.generation import Finish, FinishReason, GenerationRequest, Limits, TokenDelta
from kvherd.core.engine.reports import OrderAnswer, RankLoad
from kvherd.core.errors import EngineError, EngineStopping, SchedulerDied, StartFailed
from kvherd.core.ids import OrderId, Rank, RequestId
from kvherd.testing.scheduler import rank_facts
from kvherd.wire import scheduler_ipc as ipc

pytestmark = pytest.mark.net


class ScriptedRank:
    """The other end: hears what the servicer says, says what it is told to."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.rank = Rank(rank)
        self._context = zmq.asyncio.Context()
        self._orders = self._context.socket(zmq.PULL)
        self._orders.bind(f"ipc://{directory}/rank{rank}.in")
        self._news = self._context.socket(zmq.PUSH)
        self._news.connect(f"ipc://{directory}/out")

    async def say(self, message: ipc.FromRank) -> None:
        await self._news.send(ipc.encode(message))

    async def say_bytes(self, frame: bytes) -> None:
        await self._news.send(frame)

    async def hears(self) -> ipc.ToRank:
        async with asyncio.timeout(5):
            return ipc.decode_to_rank(await self._orders.recv())

    async def submitted(self) -> RequestId:
        message = await self.hears()
        assert isinstance(message, ipc.Submit)
        return message.request.request

    async def ordered(self) -> OrderId:
        message = await self.hears()
        assert isinstance(message, ipc.FlushOrder | ipc.StateOrder)
        return message.order

    async def progress(self, request: RequestId, *tokens: int, said: int, finish: Finish | None = None) -> None:
        load = _load(self.rank)
        await self.say(ipc.Stepped(self.rank, (ipc.Progress(request, tokens, 3, said, 0, (), finish),), load))

    async def answer(self, order: OrderId, *, done: bool = True) -> None:
        await self.say(ipc.OrderAnswered(OrderAnswer(order, self.rank, done=done, message="m", load=_load(self.rank))))

    def close(self) -> None:
        self._orders.close(linger=0)
        self._news.close(linger=0)
        self._context.term()


def _load(rank: Rank) -> RankLoad:
    return RankLoad(int(rank) + 1, 0, 0, 0, 0, 64, 4)


@asynccontextmanager
async def herd(ranks: int = 1) -> AsyncIterator[tuple[ZmqScheduler, list[ScriptedRank], list[EngineError]]]:
    failures: list[EngineError] = []
    with tempfile.TemporaryDirectory(prefix="kvh-") as name:
        async with ZmqScheduler(Path(name), on_failed=failures.append) as scheduler:
            scripted = [ScriptedRank(Path(name), rank) for rank in range(ranks)]
            try:
                for each in scripted:
                    await each.say(ipc.Ready(rank_facts(each.rank)))
                await scheduler.ready(ranks, deadline_s=5)
                yield scheduler, scripted, failures
            finally:
                for each in scripted:
                    each.close()


def asked(name: str = "a", *, rank: int | None = None) -> GenerationRequest:
    return GenerationRequest(RequestId(name), [1, 2, 3], Limits(10), rank=rank)


def deltas_of(scheduler: ZmqScheduler, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
    return scheduler.generate(request)


async def test_a_slow_reader_finds_one_delta_with_everything_in_it() -> None:
    async with herd() as (scheduler, [rank], _), aclosing(deltas_of(scheduler, asked())) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        request = await rank.submitted()
        await rank.progress(request, 10, said=1)
        assert (await first).token_ids == (10,)
        await rank.progress(request, 11, said=2)
        await rank.progress(request, 12, said=3)
        await rank.progress(request, 13, said=4, finish=Finish(FinishReason.LENGTH))
        await _state(scheduler, rank)  # answers come in order: what was said before it has been read
        rest = [delta async for delta in deltas]
        assert [(delta.token_ids, delta.completion_tokens) for delta in rest] == [((11, 12, 13), 4)]


async def _state(scheduler: ZmqScheduler, *ranks: ScriptedRank) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(scheduler.state())
        for rank in ranks:
            await rank.answer(await rank.ordered())


async def test_an_answer_that_comes_too_late_is_dropped_and_counted_and_never_the_next_ones() -> None:
    async with herd() as (scheduler, [rank], _):
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        report = await scheduler.state(timeout_s=0.2)
        assert report.silent == (Rank(0),)
        assert 0.19 <= loop.time() - began_s < 0.6
        late = await rank.ordered()
        assert await rank.hears() == ipc.Withdraw(late)
        async with asyncio.TaskGroup() as group:
            flush = group.create_task(scheduler.flush(timeout_s=1.0))
            order = await rank.ordered()
            await rank.answer(late, done=True)
            await rank.answer(order, done=False)
        assert [answer.done for answer in flush.result().answers] == [False]
        assert scheduler.late_answers == 1


async def test_a_rank_that_says_nothing_costs_its_own_entry_and_no_more() -> None:
    async with herd(2) as (scheduler, [ann, bob], _):
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as group:
            flush = group.create_task(scheduler.flush(timeout_s=0.1))
            await ann.answer(await ann.ordered())
            await bob.ordered()
        assert [answer.rank for answer in flush.result().answers] == [0]
        assert flush.result().silent == (1,)
        assert not flush.result().done
        assert 0.1 <= loop.time() - began_s < 0.1 + ORDER_GRACE_S + 0.5


async def test_a_second_answer_of_one_rank_does_not_stand_for_another() -> None:
    async with herd(2) as (scheduler, [ann, bob], _):
        async with asyncio.TaskGroup() as group:
            state = group.create_task(scheduler.state())
            order = await ann.ordered()
            await ann.answer(order)
            await ann.answer(order)
            await bob.answer(await bob.ordered())
        assert [answer.rank for answer in state.result().answers] == [0, 1]


async def test_requests_go_to_the_rank_with_the_least_to_do_unless_they_are_pinned() -> None:
    async with (
        herd(2) as (scheduler, [ann, bob], _),
        aclosing(deltas_of(scheduler, asked("a"))) as first,
        aclosing(deltas_of(scheduler, asked("b"))) as second,
        aclosing(deltas_of(scheduler, asked("c", rank=1))) as third,
    ):
        reads = [asyncio.ensure_future(anext(deltas)) for deltas in (first, second, third)]
        for rank in (ann, bob, bob):
            await rank.progress(await rank.submitted(), 7, said=1)
        await asyncio.gather(*reads)


async def test_news_of_a_request_whose_reader_left_is_not_taken_for_its_successors() -> None:
    async with herd() as (scheduler, [rank], _):
        async with aclosing(deltas_of(scheduler, asked())) as deltas:
            first = asyncio.ensure_future(anext(deltas))
            old = await rank.submitted()
            await rank.progress(old, 10, said=1)
            await first
        assert isinstance(await rank.hears(), ipc.Abort)
        async with aclosing(deltas_of(scheduler, asked())) as deltas:
            second = asyncio.ensure_future(anext(deltas))
            new = await rank.submitted()
            await rank.progress(old, said=1, finish=Finish(FinishReason.ABORT))
            await rank.progress(new, 20, said=1)
            delta = await second
            assert delta.token_ids == (20,)
            assert delta.finish is None


async def test_a_rank_that_dies_fails_everything_in_flight_at_once_and_all_that_comes() -> None:
    async with herd(2) as (scheduler, [ann, _bob], failures):
        async with aclosing(deltas_of(scheduler, asked())) as deltas:
            first = asyncio.ensure_future(anext(deltas))
            flush = asyncio.ensure_future(scheduler.flush(timeout_s=60))
            await ann.submitted()
            scheduler.rank_died(Rank(1), "killed by SIGKILL")
            async with asyncio.timeout(10):
                with pytest.raises(SchedulerDied, match="rank 1 died: killed by SIGKILL"):
                    await first
                with pytest.raises(SchedulerDied):
                    await flush
        with pytest.raises(SchedulerDied):
            await anext(deltas_of(scheduler, asked("b")))
        with pytest.raises(SchedulerDied):
            await scheduler.state()
        assert [str(error) for error in failures] == ["the scheduler of rank 1 died: killed by SIGKILL"]


async def test_the_last_word_of_a_rank_is_the_reason() -> None:
    async with herd() as (scheduler, [rank], failures):
        async with aclosing(deltas_of(scheduler, asked())) as deltas:
            first = asyncio.ensure_future(anext(deltas))
            await rank.submitted()
            await rank.say(ipc.Fatal(Rank(0), "out of memory"))
            with pytest.raises(SchedulerDied, match="out of memory"):
                await first
        scheduler.rank_died(Rank(0), "it ended with status 1")
        assert len(failures) == 1


async def test_a_rank_that_never_comes_up_is_named() -> None:
    with tempfile.TemporaryDirectory(prefix="kvh-") as name:
        async with ZmqScheduler(Path(name)) as scheduler:
            with pytest.raises(StartFailed, match=r"rank 0 did not start: it was not ready within 0\.05 s"):
                await scheduler.ready(1, deadline_s=0.05)


async def test_a_rank_that_dies_while_starting_ends_the_wait() -> None:
    with tempfile.TemporaryDirectory(prefix="kvh-") as name:
        async with ZmqScheduler(Path(name)) as scheduler, asyncio.TaskGroup() as group:
            group.create_task(_raises_died(scheduler))
            await asyncio.sleep(0)
            scheduler.rank_died(Rank(0), "no such model")


async def _raises_died(scheduler: ZmqScheduler) -> None:
    with pytest.raises(SchedulerDied, match="no such model"):
        await scheduler.ready(1, deadline_s=5)


async def test_a_frame_that_is_none_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with herd() as (scheduler, [rank], failures):
        await rank.say_bytes(b"\xc1 not msgpack")
        await _state(scheduler, rank)
        assert scheduler.bad_frames == 1
        assert failures == []
    assert "bad frame" in caplog.text


async def test_a_socket_that_breaks_ends_the_service_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with herd() as (scheduler, [rank], failures):
        async with aclosing(deltas_of(scheduler, asked())) as deltas:
            first = asyncio.ensure_future(anext(deltas))
            await rank.submitted()
            scheduler._news.close()
            async with asyncio.timeout(10):
                with pytest.raises(EngineError):
                    await first
        assert len(failures) == 1
    assert "socket" in caplog.text


async def test_leaving_ends_what_is_in_flight_and_says_nothing_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    reads = []
    async with herd() as (scheduler, [rank], failures):
        deltas = deltas_of(scheduler, asked())
        reads.append(asyncio.ensure_future(anext(deltas)))
        await rank.submitted()
    with pytest.raises(EngineStopping):
        await reads[0]
    assert failures == []
    assert caplog.text == ""


async def test_whoever_refuses_new_requests_lets_the_others_go_on() -> None:
    async with herd() as (scheduler, [rank], _), aclosing(deltas_of(scheduler, asked())) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        request = await rank.submitted()
        scheduler.refuse_new()
        with pytest.raises(EngineStopping):
            await anext(deltas_of(scheduler, asked("b")))
        await rank.progress(request, 5, said=1, finish=Finish(FinishReason.LENGTH))
        assert (await first).token_ids == (5,)


async def test_a_drain_waits_for_what_is_in_flight_and_no_longer() -> None:
    async with herd() as (scheduler, [rank], _), aclosing(deltas_of(scheduler, asked())) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        request = await rank.submitted()
        drain = asyncio.ensure_future(scheduler.drain(within_s=5))
        await rank.progress(request, 5, said=1, finish=Finish(FinishReason.LENGTH))
        assert (await first).token_ids == (5,)
        assert not drain.done()
        await deltas.aclose()
        async with asyncio.timeout(10):
            await drain


async def test_a_drain_ends_what_is_still_in_flight_when_its_time_is_over() -> None:
    async with herd() as (scheduler, [rank], failures), aclosing(deltas_of(scheduler, asked())) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        await rank.submitted()
        await scheduler.drain(within_s=0.05)
        with pytest.raises(EngineStopping):
            await first
        assert failures == []


async def test_an_order_whose_caller_left_is_withdrawn_from_ranks_that_did_not_answer() -> None:
    async with herd(2) as (scheduler, [ann, bob], _):
        flush = asyncio.ensure_future(scheduler.flush(timeout_s=60.0, hold=True))
        order = await ann.ordered()
        assert await bob.ordered() == order
        await ann.answer(order)
        await _state(scheduler, ann, bob)  # answers come in order: ann's has been read
        flush.cancel()
        assert await bob.hears() == ipc.Withdraw(order)
        await asyncio.wait([flush])
        assert scheduler.open_orders == 0
        await bob.answer(order)
        await _state(scheduler, ann, bob)
        assert scheduler.late_answers == 1


async def test_an_order_that_a_rank_left_without_an_answer_is_withdrawn_at_its_time() -> None:
    async with herd() as (scheduler, [rank], _):
        report = await scheduler.state(timeout_s=0.05)
        assert report.silent == (0,)
        order = await rank.ordered()
        assert await rank.hears() == ipc.Withdraw(order)


async def test_a_socket_that_cannot_be_made_is_told_and_leaves_none(tmp_path: Path) -> None:
    scheduler = ZmqScheduler(tmp_path / "gone")
    with pytest.raises(StartFailed, match="its socket cannot be made"):
        await scheduler.__aenter__()
    assert scheduler._context.closed
