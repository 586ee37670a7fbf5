"""What a reader should see of the scheduler, one situation at a time. Blocks have 4 tokens, a step has 16."""

import math

import pytest

from kvherd.core.engine.generation import FinishReason, TokenLogprob
from kvherd.core.errors import RequestDuplicate
from kvherd.core.ids import OrderId
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, Tier
from kvherd.core.scheduler.flushes import MAX_PENDING
from kvherd.core.scheduler.steps import Choice
from kvherd.testing.scheduler_stage import EOS, VOCABULARY, Stage, limits, request

EIGHT = [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_prompt_that_repeats_is_taken_from_the_cache_but_for_its_last_block() -> None:
    stage = Stage(limits())
    stage.submit(request("first", EIGHT, 2))
    stage.run_dry()
    stage.submit(request("again", list(EIGHT), 2))
    stage.run_dry()
    assert (stage.cached("first"), stage.cached("again")) == (0, 4)
    assert stage.tokens("again") == stage.tokens("first")


def test_an_answer_is_cached_for_the_next_turn() -> None:
    stage = Stage(limits())
    stage.submit(request("turn one", EIGHT, 5))
    stage.run_dry()
    stage.submit(request("turn two", [*EIGHT, *stage.tokens("turn one"), 1], 1))
    stage.run_dry()
    assert stage.cached("turn two") == 12


def test_a_salt_keeps_equal_prompts_apart() -> None:
    stage = Stage(limits())
    stage.submit(request("mine", EIGHT, 1, salt="mine"))
    stage.run_dry()
    stage.submit(request("yours", list(EIGHT), 1, salt="yours"))
    stage.run_dry()
    assert stage.cached("yours") == 0
    stored = [event for event in stage.events if isinstance(event, BlocksStored)]
    assert [event.salt for event in stored] == ["mine", "yours"]
    assert not set(stored[0].block_hashes) & set(stored[1].block_hashes)


def test_a_store_tells_its_tokens_and_what_it_follows() -> None:
    stage = Stage(limits(chunk_tokens=4))
    stage.submit(request("one", EIGHT, 1))
    stage.run_dry()
    first, second = stage.events
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert (first.token_ids, first.parent_hash, first.block_size) == ((1, 2, 3, 4), None, 4)
    assert (second.token_ids, second.parent_hash) == ((5, 6, 7, 8), first.block_hashes[0])


def test_decode_rows_come_first_and_a_long_prompt_takes_the_rest_in_blocks() -> None:
    stage = Stage(limits(pool_blocks=40, chunk_tokens=16))
    stage.submit(request("talking", [1], 30))
    stage.step()
    stage.submit(request("long", [2] * 50, 1))
    assert stage.start_step()
    assert stage.plan is not None
    assert [len(row.token_ids) for row in stage.plan.rows] == [1, 12]


def test_a_prompt_moves_on_even_when_decode_rows_fill_the_budget() -> None:
    stage = Stage(limits(pool_blocks=40, chunk_tokens=4))
    for name in "abcde":
        stage.submit(request(name, [ord(name) - 97], 20))
    stage.submit(request("long", [9] * 8, 1))
    for _ in range(12):
        stage.step()
    assert stage.ended("long") is FinishReason.LENGTH
    assert stage.ended("a") is None


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    stage = Stage(limits(pool_blocks=40))
    for name in ("ann", "bob", "cat"):
        stage.submit(request(name, [5] * 13, 1))
    stage.start_step()
    assert stage.scheduler.load(0).running == 1, "whoever waits for a prefix reserves nothing"
    stage.run_dry()
    assert [stage.cached(name) for name in ("ann", "bob", "cat")] == [0, 12, 12]


def test_a_sequence_that_runs_already_skips_what_another_computes_meanwhile() -> None:
    """1. A long prompt leaves 2 tokens of each step, too few for a block: both others are admitted, none computes.
    2. When it is done ann computes her prompt; bob, who needs the same blocks, waits. 3. He takes them from there."""
    stage = Stage(limits(pool_blocks=40, chunk_tokens=22))
    stage.submit(request("long", [1] * 40, 1))
    stage.submit(request("ann", [2] * 12, 1))
    stage.submit(request("bob", [2] * 12, 1))
    stage.step()
    assert stage.scheduler.load(0).running == 3
    stage.run_dry()
    assert (stage.cached("ann"), stage.cached("bob")) == (0, 8)
    assert stage.scheduler.load(0).steps_total == 4


def test_a_block_that_two_sequences_computed_is_stored_once_and_held_once() -> None:
    """Two answers grow into the same block: the second to fill it takes the first's and frees its own."""
    stage = Stage(limits(pool_blocks=40))
    stage.submit(request("ann", [5, 5, 5], 6))
    stage.step()
    stage.submit(request("bob", [5, 5, 5], 6))
    stage.run_dry()
    assert stage.tokens("ann") == stage.tokens("bob")
    stored = [name for event in stage.events if isinstance(event, BlocksStored) for name in event.block_hashes]
    assert len(stored) == len(set(stored)) == 2
    assert stage.scheduler.load(0).used_tokens == 8


def test_the_block_released_longest_ago_is_evicted_first_and_leaves_before_their_parents() -> None:
    stage = Stage(limits(pool_blocks=4))
    stage.submit(request("old", EIGHT, 1))
    stage.run_dry()
    stage.submit(request("new", [9] * 8, 1))
    stage.run_dry()
    stage.submit(request("third", [7] * 4, 1))
    stage.run_dry()
    removed = [event for event in stage.events if isinstance(event, BlocksRemoved)]
    stored = [event for event in stage.events if isinstance(event, BlocksStored)]
    assert [event.block_hashes for event in removed] == [(stored[0].block_hashes[1],)]
    assert stage.scheduler.load(0).evicted_tokens_total == 4


def test_a_prefix_used_again_is_younger_than_one_that_was_not() -> None:
    stage = Stage(limits(pool_blocks=4))
    for name, token in (("hot", 1), ("cold", 2), ("hot again", 1)):
        stage.submit(request(name, [token] * 5, 1))
        stage.run_dry()
    stage.submit(request("wide", [3] * 9, 1))
    stage.run_dry()
    stage.submit(request("still hot", [1] * 5, 1))
    stage.run_dry()
    assert stage.cached("still hot") == 4
    assert sum(isinstance(event, BlocksRemoved) for event in stage.events) == 1


def test_salts_that_are_gone_leave_nothing_behind() -> None:
    stage = Stage(limits(pool_blocks=2))
    for turn in range(9):
        stage.submit(request(f"r{turn}", [1] * 5, 1, salt=f"tenant {turn}"))
        stage.run_dry()
    assert len(stage.scheduler._memory.tree._roots) <= 2


def test_a_small_request_does_not_overtake_one_that_waits_for_memory() -> None:
    stage = Stage(limits(pool_blocks=8))
    stage.submit(request("running", [1] * 12, 8))
    stage.step()
    stage.submit(request("large", [2] * 20, 1))
    stage.submit(request("small", [3], 1))
    stage.step()
    assert stage.said["small"] == []
    stage.run_dry()
    assert stage.ended("small") is FinishReason.LENGTH


def test_a_newcomer_leaves_each_running_sequence_a_block_to_grow_into() -> None:
    stage = Stage(limits(pool_blocks=5))
    stage.submit(request("running", [1] * 8, 4))
    stage.step()
    stage.submit(request("newcomer", [2] * 8, 1))
    stage.step()
    assert stage.scheduler.load(0).waiting == 1
    stage.run_dry()
    assert stage.ended("newcomer") is FinishReason.LENGTH


def test_the_youngest_gives_way_when_the_pool_runs_out_and_says_the_same_later() -> None:
    lone = {}
    for name, token in (("old", 1), ("young", 2)):
        alone = Stage(limits(pool_blocks=5))
        alone.submit(request(name, [token] * 4, 16))
        alone.run_dry()
        lone[name] = alone.tokens(name)
    stage = Stage(limits(pool_blocks=5))
    stage.submit(request("old", [1] * 4, 16))
    stage.submit(request("young", [2] * 4, 16))
    while stage.ended("old") is None:
        stage.step()
    assert stage.scheduler.load(0).steps_total == 16, "the oldest was held up"
    assert stage.scheduler.load(0).waiting == 1
    stage.run_dry()
    assert {name: stage.tokens(name) for name in lone} == lone
    ends = {name: deltas[-1] for name, deltas in stage.said.items()}
    assert all(end.cached_tokens == 0 for end in ends.values())
    assert any(isinstance(event, BlocksRemoved) for event in stage.events), "the pool never ran out: test nothing"


def test_a_request_larger_than_the_pool_is_refused_at_once_with_both_numbers() -> None:
    stage = Stage(limits(pool_blocks=4))
    stage.submit(request("fits", [1] * 10, 7))
    stage.submit(request("large", [1] * 10, 8))
    assert stage.ended("fits") is None
    finish = stage.said["large"][0].finish
    assert finish is not None
    assert (finish.reason, finish.message) == (
        FinishReason.ABORT,
        "the prompt has 10 tokens and 8 are asked for, but the KV pool holds 16",
    )


@pytest.mark.parametrize(
    ("prompt", "tokens", "says"),
    [
        ([], 1, "the prompt is empty"),
        ([VOCABULARY], 1, f"token {VOCABULARY} is not in the vocabulary of {VOCABULARY}"),
        ([-1], 1, f"token -1 is not in the vocabulary of {VOCABULARY}"),
        ([1], -1, "max_new_tokens is -1; it must not be negative"),
        ([1] * 150, 51, "the prompt has 150 tokens and 51 are asked for, but the context holds 200"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_its_reason(prompt: list[int], tokens: int, says: str) -> None:
    stage = Stage(limits(pool_blocks=99))
    stage.submit(request("bad", prompt, tokens))
    finish = stage.said["bad"][0].finish
    assert finish is not None
    assert finish.message == says
    assert not stage.step()


def test_a_full_queue_refuses_and_the_others_go_on() -> None:
    stage = Stage(limits(max_waiting=1))
    stage.submit(request("one", [1], 2))
    stage.submit(request("two", [2], 2))
    stage.run_dry()
    assert (stage.ended("one"), stage.ended("two")) == (FinishReason.LENGTH, FinishReason.ABORT)


def test_a_live_id_cannot_be_taken_and_a_finished_one_can() -> None:
    stage = Stage(limits())
    stage.submit(request("id", [1], 2))
    with pytest.raises(RequestDuplicate):
        stage.scheduler.submit(request("id", [2], 2), 0.0)
    stage.run_dry()
    stage.submit(request("id", [2], 2))
    stage.run_dry()
    assert stage.ended("id") is FinishReason.LENGTH


def test_an_id_may_be_used_again_while_the_step_of_its_aborted_request_still_runs() -> None:
    """1. A step computes for `id`. 2. It is aborted. 3. A new `id` comes. 4. The step ends: its token is nobody's."""
    stage = Stage(limits())
    stage.submit(request("id", [1, 2, 3, 4, 5], 3))
    stage.start_step()
    stage.abort("id", "client left")
    finish = stage.said["id"][-1].finish
    assert finish is not None
    assert (finish.reason, finish.message) == (FinishReason.ABORT, "client left")
    stage.submit(request("id", [6], 2))
    stage.finish_step()
    assert stage.tokens("id") == []
    stage.run_dry()
    assert len(stage.tokens("id")) == 2


def test_what_an_aborted_request_computed_stays_cached() -> None:
    stage = Stage(limits())
    stage.submit(request("gone", EIGHT, 9))
    stage.start_step()
    stage.abort("gone")
    stage.finish_step()
    stage.submit(request("next", [*EIGHT, 1], 1))
    stage.run_dry()
    assert stage.cached("next") == 8


def test_an_unknown_abort_changes_nothing() -> None:
    stage = Stage(limits())
    stage.abort("nobody")
    assert stage.scheduler.load(0).aborts_total == 0


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it() -> None:
    free = Stage(limits())
    free.submit(request("free", [1], 6))
    free.run_dry()
    third = free.tokens("free")[2]
    stage = Stage(limits())
    stage.submit(request("stopped", [1], 6, stop=(third,)))
    stage.run_dry()
    last = stage.said["stopped"][-1]
    assert stage.tokens("stopped") == free.tokens("free")[:2]
    assert last.finish is not None
    assert (last.finish.reason, last.finish.matched) == (FinishReason.STOP, third)


def test_nothing_ends_an_answer_before_its_least_length() -> None:
    free = Stage(limits())
    free.submit(request("free", [1], 6))
    free.run_dry()
    first = free.tokens("free")[0]
    stage = Stage(limits())
    stage.submit(request("patient", [1], 6, min_tokens=3, stop=(first, EOS)))
    stage.run_dry()
    assert len(stage.tokens("patient")) >= 3
    assert first not in stage.tokens("patient")[:3]


def test_no_token_asked_for_computes_the_prompt_and_ends() -> None:
    stage = Stage(limits())
    stage.submit(request("warm", EIGHT, 0))
    stage.run_dry()
    assert stage.tokens("warm") == []
    assert stage.ended("warm") is FinishReason.LENGTH
    assert stage.scheduler.load(0).used_tokens == 8


def test_a_flush_of_an_idle_rank_is_done_at_once_and_says_how_much() -> None:
    stage = Stage(limits())
    stage.submit(request("one", EIGHT, 1))
    stage.run_dry()
    stage.flush("flush")
    answer = stage.answer("flush")
    assert (answer.done, answer.cleared_blocks) == (True, 2)
    assert stage.events[-1] == CacheCleared()
    assert stage.scheduler.load(0).used_tokens == 0


def test_a_flush_that_may_not_wait_is_refused_with_what_is_busy() -> None:
    stage = Stage(limits(max_running=1))
    stage.submit(request("one", [1], 5))
    stage.submit(request("two", [2], 5))
    stage.step()
    stage.flush("now")
    answer = stage.answer("now")
    assert (answer.done, answer.timed_out, answer.message) == (False, False, "the engine is busy: 1 running, 1 queued")
    assert {blocker.kind: blocker.count for blocker in answer.blockers} == {"running": 1, "queued": 1}


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -math.inf, -1.0])
def test_a_time_out_that_is_no_time_is_refused_even_when_idle(timeout_s: float) -> None:
    stage = Stage(limits())
    stage.flush("bad", timeout_s)
    assert not stage.answer("bad").done
    assert "finite" in stage.answer("bad").message


def test_flushes_that_wait_share_one_clearing_after_the_last_step() -> None:
    stage = Stage(limits())
    stage.submit(request("one", EIGHT, 2))
    stage.step()
    stage.flush("ann", 5.0)
    stage.flush("bob", 9.0)
    assert stage.answers == {"ann": [], "bob": []}
    stage.run_dry()
    assert stage.answer("ann").cleared_blocks == stage.answer("bob").cleared_blocks == 2
    assert stage.events.count(CacheCleared()) == 1
    assert stage.scheduler.load(0).flushes_total == 1


def test_a_flush_expires_at_its_time_while_a_long_step_runs() -> None:
    stage = Stage(limits())
    stage.submit(request("one", EIGHT, 1))
    stage.start_step()
    stage.flush("flush", 0.5)
    stage.pass_time(60)
    [(at_s, answer)] = stage.answers["flush"]
    assert (at_s, answer.timed_out, answer.message) == (0.5, True, "not idle within 0.5 s: 1 running")
    stage.finish_step()
    assert CacheCleared() not in stage.events


def test_a_step_that_ends_late_does_not_make_an_expired_flush_done() -> None:
    """1. A flush waits 0.5 s. 2. The loop sleeps past that. 3. It hears of the step's end before it looks at time."""
    stage = Stage(limits())
    stage.submit(request("one", EIGHT, 1))
    stage.start_step()
    stage.flush("flush", 0.5)
    stage.now_s = 0.7
    stage.finish_step()
    assert stage.answer("flush").timed_out
    assert stage.answer("flush").blockers


def test_an_abort_can_be_what_a_flush_waited_for() -> None:
    stage = Stage(limits(max_running=1))
    stage.submit(request("one", [1], 5))
    stage.flush("flush", 5.0)
    stage.abort("one")
    assert stage.answer("flush").done


def test_requests_wait_behind_a_flush_that_holds_and_run_after_it() -> None:
    stage = Stage(limits())
    stage.submit(request("before", [1], 4))
    stage.step()
    stage.flush("flush", 60.0, hold=True)
    stage.submit(request("after", [2], 1))
    while stage.ended("before") is None:
        stage.step()
    assert stage.said["after"] == []
    assert stage.answer("flush").done
    stage.run_dry()
    assert stage.ended("after") is FinishReason.LENGTH


def test_without_hold_a_steady_stream_keeps_a_flush_waiting_until_its_time() -> None:
    stage = Stage(limits())
    stage.submit(request("r0", [1], 2))
    stage.flush("flush", 3.0)
    for turn in range(1, 9):
        stage.submit(request(f"r{turn}", [turn], 2))
        stage.step()
        stage.pass_time(0.5)
    assert stage.answer("flush").timed_out


def test_a_flush_that_held_and_expired_lets_the_held_ones_run() -> None:
    stage = Stage(limits())
    stage.submit(request("before", [1], 30))
    stage.step()
    stage.flush("flush", 1.0, hold=True)
    stage.submit(request("after", [2], 1))
    stage.step()
    assert stage.said["after"] == []
    stage.pass_time(1.0)
    stage.step()
    assert stage.ended("after") is FinishReason.LENGTH


def test_stopping_ends_every_request_and_refuses_what_waits() -> None:
    stage = Stage(limits(max_running=1))
    stage.submit(request("running", [1], 9))
    stage.submit(request("waiting", [2], 9))
    stage.step()
    stage.flush("flush", 9.0)
    stage._hear(stage.scheduler.abort_all("stopping", 0.0))
    assert {stage.ended("running"), stage.ended("waiting")} == {FinishReason.ABORT}
    assert (stage.answer("flush").done, stage.answer("flush").message) == (False, "stopping")


def test_the_load_counts_what_runs_what_waits_and_what_is_held() -> None:
    stage = Stage(limits(max_running=1))
    stage.submit(request("one", EIGHT, 3))
    stage.step()
    stage.submit(request("two", [*EIGHT, 1], 3))
    load = stage.scheduler.load(0.0)
    assert (load.running, load.waiting, load.waiting_uncached_tokens) == (1, 1, 1)
    assert (load.used_tokens, load.active_tokens, load.capacity_tokens) == (8, 8, 64)
    stage.run_dry()
    load = stage.scheduler.load(0.0)
    assert (load.requests_total, load.prompt_tokens_total, load.cached_tokens_total) == (2, 17, 8)
    assert (load.generated_tokens_total, load.active_tokens) == (6, 0)
    assert load.gen_tokens_per_s > 0
    assert stage.scheduler.load(100.0).gen_tokens_per_s == 0


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    stage = Stage(limits())
    stage.submit(request("ann", [1], 1))
    stage.submit(request("bob", [2], 1))
    stage.start_step()
    assert stage.plan is not None
    seeds = {row.sampling.seed for row in stage.plan.rows}
    assert len(seeds) == 2
    assert None not in seeds


def test_a_prefix_in_use_all_day_takes_no_more_memory_in_the_evening() -> None:
    stage = Stage(limits())
    for turn in range(100):
        stage.submit(request(f"r{turn}", [1] * 5, 1))
        stage.run_dry()
    assert len(stage.scheduler._memory.tree._oldest) <= 2 * 1 + 64


def test_more_flushes_than_can_wait_are_refused() -> None:
    stage = Stage(limits())
    stage.submit(request("busy", [1], 9))
    for turn in range(MAX_PENDING):
        stage.flush(f"f{turn}", 5.0)
    stage.flush("one more", 5.0)
    assert stage.answer("one more").message == f"{MAX_PENDING} flushes are waiting here already, the limit"
    stage.pass_time(5.0)
    assert all(stage.answer(f"f{turn}").timed_out for turn in range(MAX_PENDING))


def test_a_state_order_is_answered_with_the_load() -> None:
    stage = Stage(limits())
    [answer] = stage.scheduler.state(OrderId("state"), 0.0).answers
    assert answer.done
    assert answer.load == stage.scheduler.load(0.0)


def test_a_sampled_logprob_goes_with_its_token() -> None:
    stage = Stage(limits())
    stage.submit(request("one", [1], 1))
    stage.start_step()
    news = stage.scheduler.complete_step([Choice(5, TokenLogprob(5, -0.5))], 0.0)
    [(_, delta)] = news.progress
    assert (delta.token_ids, delta.logprobs) == ((5,), (TokenLogprob(5, -0.5),))


# --- the host tier ----------------------------------------------------------------------------------------


def test_what_was_evicted_is_loaded_back_from_the_host() -> None:
    stage = Stage(limits(pool_blocks=4, host_blocks=16))
    stage.submit(request("first", EIGHT, 1))
    stage.run_dry()
    stage.write_all()
    stage.submit(request("other", [9] * 15, 1))
    stage.run_dry()
    assert set(stage.follower.blocks).isdisjoint(stage.follower.host)
    stage.submit(request("again", [*EIGHT, 1], 1))
    stage.run_dry()
    assert stage.cached("again") == 8
    assert stage.said["again"][-1].host_tokens == 8
    assert stage.scheduler.load(0.0).host_loaded_tokens_total == 8
    assert [event.tier for event in stage.events if isinstance(event, BlocksStored)].count(Tier.HOST) == 2


def test_a_block_that_is_evicted_while_it_is_written_has_no_copy() -> None:
    stage = Stage(limits(pool_blocks=4, host_blocks=16))
    stage.submit(request("first", EIGHT, 1))
    stage.run_dry()
    stage.start_write()
    stage.submit(request("other", [9] * 15, 1))
    stage.run_dry()
    stage.finish_write()
    assert not stage.follower.host
    stage.write_all()
    stage.submit(request("again", [*EIGHT, 1], 1))
    stage.run_dry()
    assert stage.cached("again") == 0


def test_the_prefix_that_was_asked_for_longest_ago_leaves_the_host_first() -> None:
    stage = Stage(limits(pool_blocks=20, host_blocks=4))
    for name, prompt in (("a", EIGHT), ("b", [5] * 8)):
        stage.submit(request(name, prompt, 1))
        stage.run_dry()
        stage.write_all()
    stage.submit(request("a again", [*EIGHT, 1], 1))
    stage.run_dry()
    stage.submit(request("c", [6] * 8, 1))
    stage.run_dry()
    stage.write_all()
    kept = {tokens for _, tokens in stage.follower.host.values()}
    assert kept == {(1, 2, 3, 4), (5, 6, 7, 8), (6, 6, 6, 6)}


def test_a_flush_waits_for_the_write_under_way_and_empties_the_host_too() -> None:
    stage = Stage(limits(host_blocks=16))
    stage.submit(request("first", EIGHT, 1))
    stage.run_dry()
    stage.start_write()
    stage.flush("now")
    assert [(each.kind, each.count) for each in stage.answer("now").blockers] == [("writing", 2)]
    stage.flush("soon", 1.0)
    stage.finish_write()
    assert stage.answer("soon").done
    assert not stage.follower.host
    assert not stage.start_write()
    assert stage.scheduler.load(0.0).host_used_tokens == 0


def test_without_a_host_tier_nothing_is_written() -> None:
    stage = Stage(limits())
    stage.submit(request("first", EIGHT, 1))
    stage.run_dry()
    assert not stage.start_write()


def test_a_flush_that_is_withdrawn_is_not_answered_and_holds_nobody_back() -> None:
    stage = Stage(limits())
    stage.submit(request("busy", EIGHT, 50))
    stage.step()
    stage.flush("held", 60.0, hold=True)
    stage.submit(request("later", [9] * 8, 2))
    stage.step()
    assert stage.tokens("later") == []
    stage.withdraw("held")
    stage.step()
    stage.step()
    assert len(stage.tokens("later")) == 2
    stage.run_dry()
    assert stage.answers["held"] == []
    assert CacheCleared() not in stage.events


def test_a_withdrawal_leaves_other_flushes_and_finished_ones_alone() -> None:
    stage = Stage(limits())
    stage.submit(request("busy", EIGHT, 50))
    stage.step()
    stage.flush("mine", 60.0)
    stage.flush("yours", 60.0)
    stage.withdraw("mine")
    stage.withdraw("nobody's")
    stage.run_dry()
    assert stage.answers["mine"] == []
    assert stage.answer("yours").done
    stage.withdraw("yours")
    assert stage.answer("yours").done


def test_the_time_of_a_flush_counts_from_when_its_caller_called() -> None:
    stage = Stage(limits())
    stage.submit(request("busy", EIGHT, 50))
    stage.step()
    stage.now_s = 100.0
    late = stage.scheduler.flush(OrderId("late"), timeout_s=5.0, hold=False, now_s=100.0, asked_s=97.0)
    assert late.answers == ()
    assert stage.scheduler.next_deadline_s == 102.0
    news = stage.scheduler.flush(OrderId("too late"), timeout_s=5.0, hold=False, now_s=100.0, asked_s=90.0)
    assert [(answer.order, answer.timed_out) for answer in news.answers] == [("too late", True)]
