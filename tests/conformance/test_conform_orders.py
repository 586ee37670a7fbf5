"""What an engine promises of orders and of its KV events, over gRPC."""

import math
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from kvherd.testing.engine_client import EngineClient, fresh_prompt, refused
from kvherd.testing.engines_under_test import EngineUnderTest

OK, LATE = grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED
BAD_TIMES_S = [-1.0, -0.001, -math.inf, math.nan, math.inf, 1e12]


# --- flushes -----------------------------------------------------------------------------------


def test_an_idle_engine_flushes_now_at_every_rank(engine: EngineClient) -> None:
    prompt, ranks = fresh_prompt(), range(engine.address.ranks)
    for rank in ranks:
        engine.complete(prompt, rank=rank)
    assert [engine.complete(prompt, rank=rank).cached_tokens > 0 for rank in ranks] == [True] * len(ranks)
    flushed = engine.flush(0)
    assert (flushed.code, flushed.answer.success) == (OK, True)
    assert [engine.complete(prompt, rank=rank).cached_tokens for rank in ranks] == [0] * len(ranks)


def test_a_busy_engine_refuses_a_flush_that_may_not_wait_and_says_what_is_busy(engine: EngineClient) -> None:
    with engine.busy():
        flushed = engine.flush(0)
    assert (flushed.code, flushed.answer.success) == (OK, False)
    assert "running" in flushed.answer.message


def test_a_flush_of_a_busy_engine_exceeds_its_deadline_when_its_time_is_over(engine: EngineClient) -> None:
    with engine.busy():
        began_s = time.monotonic()
        flushed = engine.flush(0.5)
        took_s = time.monotonic() - began_s
    assert flushed.code is LATE
    assert 0.5 <= took_s < 0.5 + engine.patience_s / 2
    assert "running" in flushed.details


def test_a_flush_is_done_once_the_engine_is_idle_within_its_time(engine: EngineClient) -> None:
    prompt = fresh_prompt()
    engine.complete(prompt)
    with ThreadPoolExecutor(1) as pool:
        with engine.running():
            waiting = pool.submit(engine.flush, 60)
            time.sleep(0.3)  # most likely it waits by now; whether or not, it must be done in the end
        flushed = waiting.result()
    assert (flushed.code, flushed.answer.success) == (OK, True)
    assert engine.complete(prompt).cached_tokens == 0


@pytest.mark.parametrize("timeout_s", BAD_TIMES_S)
def test_a_time_that_nobody_can_wait_is_an_invalid_argument(engine: EngineClient, timeout_s: float) -> None:
    flushed = engine.flush(timeout_s)
    assert flushed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "timeout" in flushed.details
    assert engine.flush(5).answer.success


def test_a_rank_that_is_busy_makes_it_no_success_and_each_rank_says_its_own(pair: EngineClient) -> None:
    with pair.busy(1):
        flushed = pair.flush(0)
    assert (flushed.code, flushed.answer.success) == (OK, False)
    cleared, busy = flushed.answer.message.split("; ")
    assert cleared.startswith("rank 0: cleared")
    assert busy.startswith("rank 1: the engine is busy: ")
    assert "running" in busy


def test_two_flushes_with_different_times_are_each_answered_at_theirs(engine: EngineClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        with engine.busy():
            long = pool.submit(engine.flush, 60)
            short = engine.flush(0.3)
            assert not long.done()
        assert short.code is LATE
        assert long.result().answer.success


def test_a_flush_whose_caller_left_is_withdrawn(engine: EngineClient) -> None:
    prompt = fresh_prompt()
    engine.complete(prompt, rank=0)
    request = common_pb2.FlushCacheRequest(timeout_s=60)
    with engine.busy():
        with refused("DEADLINE_EXCEEDED"):
            engine.stub.FlushCache(request, timeout=0.5)
        engine.until_under_way(0)
    assert engine.complete(prompt, rank=0).cached_tokens > 0


# --- orders beside each other -----------------------------------------------------------------------------------


def test_orders_of_other_kinds_go_on_while_a_flush_waits(engine: EngineClient, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with engine.busy():
            waiting = pool.submit(engine.flush, 60)
            assert engine.loads()
            assert engine.call("GetServerInfo", pb.GetServerInfoRequest()).code is OK
            assert not engine.call("Abort", pb.AbortRequest(request_id="nobody")).answer.success
            assert engine.start_profile(output_dir=str(tmp_path), activities=["CPU"]).answer.success
            assert engine.stop_profile().answer.success
            assert not waiting.done()
        assert waiting.result().answer.success


def test_a_rank_that_stands_still_costs_an_order_its_time_and_the_next_order_nothing(
    mortal: EngineUnderTest, engine: EngineClient
) -> None:
    """The answer that comes when it goes on belongs to the order that was given up, and to no later one."""
    rank = engine.address.ranks - 1
    pid = mortal.rank_pid(rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        silent = engine.flush(0.5)
        took_s = time.monotonic() - began_s
    finally:
        os.kill(pid, signal.SIGCONT)
    assert silent.code is LATE
    assert took_s < 0.5 + engine.patience_s / 2
    with engine.busy(rank):
        refusal = engine.flush(0)
        assert (refusal.code, refusal.answer.success) == (OK, False)
    assert engine.flush(30).answer.success


# --- profiles -----------------------------------------------------------------------------------


def test_a_profile_starts_once_and_stops_once(engine: EngineClient, tmp_path: Path) -> None:
    assert engine.start_profile(output_dir=str(tmp_path), activities=["CPU"]).answer.success
    second = engine.start_profile(output_dir=str(tmp_path), activities=["CPU"])
    engine.complete(fresh_prompt())
    assert engine.stop_profile().answer.success
    assert second.code is grpc.StatusCode.FAILED_PRECONDITION
    assert list(tmp_path.rglob("*.json*"))
    assert engine.stop_profile().code is grpc.StatusCode.FAILED_PRECONDITION


def test_a_profile_that_a_rank_refuses_is_no_success_and_says_why(engine: EngineClient, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refusal = engine.start_profile(output_dir=str(tmp_path / "file"), activities=["CPU"])
    engine.stop_profile()
    assert (refusal.code, refusal.answer.success) == (OK, False)
    assert "file" in refusal.answer.message


def test_a_field_of_a_profile_that_cannot_be_is_an_invalid_argument(engine: EngineClient, tmp_path: Path) -> None:
    refusal = engine.start_profile(output_dir=str(tmp_path), activities=["CAFFEINE"])
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "CAFFEINE" in refusal.details


# --- KV events -----------------------------------------------------------------------------------


def subscribed(engine: EngineClient, start: int = 0) -> Any:
    request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=start)
    return engine.stub.SubscribeKvEvents(request, timeout=engine.patience_s)


def tokens_of(batch: common_pb2.KvEventBatch) -> list[int]:
    return [token for event in batch.events for block in event.stored.blocks for token in block.token_ids]


def batch_with(events: Any, wanted: int) -> common_pb2.KvEventBatch:
    """The first batch that stores a block which begins with this token."""
    for batch in events:
        if wanted in tokens_of(batch)[:1]:
            found: common_pb2.KvEventBatch = batch
            return found
    raise AssertionError("the stream ended")


def test_events_tell_what_is_stored_and_what_a_flush_cleared(engine: EngineClient) -> None:
    assert engine.flush(5).answer.success
    events = subscribed(engine)
    prompt = fresh_prompt()
    engine.complete(prompt, rank=0)
    stored = tokens_of(batch_with(events, prompt[0]))
    assert stored == prompt[: len(stored)]
    assert len(stored) >= len(prompt) // 2
    assert engine.flush(5).answer.success
    assert any(event.WhichOneof("data") == "cleared" for batch in events for event in batch.events)
    events.cancel()


def test_a_stream_goes_on_right_after_the_batch_that_it_names(engine: EngineClient) -> None:
    if engine.address.ranks > 1:  # one number names no place in the events of several ranks
        with refused("OUT_OF_RANGE"):
            next(subscribed(engine, 1))
        return
    assert engine.flush(5).answer.success
    events = subscribed(engine)
    prompt = fresh_prompt()
    engine.complete(prompt)
    last = batch_with(events, prompt[0]).sequence_number
    events.cancel()
    engine.complete(fresh_prompt())
    again = subscribed(engine, last)
    assert next(again).sequence_number == last + 1
    again.cancel()


def test_a_stream_that_cannot_be_gone_on_with_is_out_of_range(engine: EngineClient) -> None:
    with refused("OUT_OF_RANGE"):
        next(subscribed(engine, 10**9))


# --- the end -----------------------------------------------------------------------------------


def test_a_scheduler_that_dies_is_told_to_everybody_at_once(
    mortal: EngineUnderTest, engine: EngineClient, tmp_path: Path
) -> None:
    """A stream, a subscriber and two orders under way end with UNAVAILABLE; the process ends and leaves its port."""
    rank = engine.address.ranks - 1
    os.kill(mortal.rank_pid(rank), signal.SIGSTOP)
    events = subscribed(engine)
    with ThreadPoolExecutor(4) as pool:
        stream = pool.submit(code_of, engine.generate(fresh_prompt(), tokens=4, rank=rank, stream=True))
        flushing = pool.submit(engine.flush, 60)
        profiling = pool.submit(engine.start_profile, output_dir=str(tmp_path), activities=["CPU"])
        watching = pool.submit(code_of, events)
        engine.until_under_way(2)
        os.kill(mortal.rank_pid(rank), signal.SIGKILL)
        unavailable = grpc.StatusCode.UNAVAILABLE
        assert [flushing.result().code, profiling.result().code] == [unavailable, unavailable]
        assert [stream.result(), watching.result()] == [unavailable, unavailable]
    assert mortal.process is not None
    assert mortal.process.wait(within_s=engine.patience_s) != 0
    mortal.process.assert_nothing_left(ports=[engine.address.port, engine.address.sidecar_port or 0])


def code_of(call: Any) -> grpc.StatusCode:
    """Read it to its end: what that is."""
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        failed: Any = error
        return failed.code()
    return OK


def test_an_engine_that_stops_lets_short_answers_end_and_ends_the_rest(
    mortal: EngineUnderTest, engine: EngineClient
) -> None:
    """
    1. A short and an endless answer are under way, and a subscriber waits, when it is asked to stop.
    2. Nobody new is served, and the short one comes whole.
    3. The endless one and the subscriber hear UNAVAILABLE within the bound; the process ends well and leaves nothing.
    """
    unavailable = grpc.StatusCode.UNAVAILABLE
    events = subscribed(engine)
    events.initial_metadata()
    short = engine.generate(fresh_prompt(), tokens=30, rank=0, stream=True)
    endless = engine.generate(fresh_prompt(), tokens=engine.address.long_tokens, stream=True)
    next(short)
    next(endless)
    assert mortal.process is not None, "it is ours"
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(code_of, call) for call in (endless, events)]
        mortal.process.signal(signal.SIGTERM)
        *_, last = short
        assert last.complete.completion_tokens == 30
        engine.until(lambda: code_of(engine.generate([1, 2, 3])) is unavailable, "nobody new is served")
        assert [end.result() for end in ends] == [unavailable, unavailable]
    assert mortal.process.wait(within_s=30) == 0
    mortal.process.assert_nothing_left(ports=[engine.address.port, engine.address.sidecar_port or 0])
