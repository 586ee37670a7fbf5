"""A store behind the host tier: what it saves, and how little anything depends on it."""

from kvherd.core.kv.events import BlocksStored, Tier
from kvherd.core.scheduler.steps import FetchPlan, LookPlan
from kvherd.core.scheduler.storage_tier import REST_S
from kvherd.testing.scheduler_stage import Stage, ToyStore, limits, request

EIGHT = [1, 2, 3, 4, 5, 6, 7, 8]
ASKS_FOR_EIGHT = [*EIGHT, 1]


def engine(store: ToyStore, *, weights: str = "weights", host_blocks: int = 16, pool_blocks: int = 16) -> Stage:
    return Stage(limits(pool_blocks=pool_blocks, host_blocks=host_blocks, store=weights), store)


def filled(*prompts: list[int]) -> ToyStore:
    """A store in which another engine left these."""
    store = ToyStore()
    first = engine(store)
    for index, prompt in enumerate(prompts):
        first.submit(request(f"p{index}", prompt, 1))
        first.run_dry()
        first.put_all()
    return store


def blockers(stage: Stage, name: str) -> list[tuple[str, int]]:
    return [(each.kind, each.count) for each in stage.answer(name).blockers]


def test_a_prefix_that_one_engine_computed_is_read_by_another() -> None:
    store = filled(EIGHT)
    assert len(store.blocks) == 2
    second = engine(store)
    second.submit(request("again", ASKS_FOR_EIGHT, 2))
    second.run_dry()
    assert second.cached("again") == 8
    assert tiers(second, "again") == (0, 0, 8)
    assert second.scheduler.load(0.0).store_fetched_tokens_total == 8
    [host] = [event for event in second.events if isinstance(event, BlocksStored) and event.tier is Tier.HOST]
    assert host.token_ids == tuple(EIGHT)


def tiers(stage: Stage, name: str) -> tuple[int, int, int]:
    """Cached tokens of a prompt by where they lay: device, host, storage."""
    said = stage.said[name][-1]
    return said.cached_tokens - said.host_tokens - said.storage_tokens, said.host_tokens, said.storage_tokens


def test_each_cached_token_is_told_by_where_it_lay() -> None:
    """1. The store brings two blocks. 2. Another prompt takes the place of the second on the device; it is in host
    memory still. 3. A prompt has both, and a third that only the store has. 4. All of it is on the device now.
    """
    stage = engine(filled([*EIGHT, 9, 9, 9, 9]), pool_blocks=4)
    for name, prompt in (("one", ASKS_FOR_EIGHT), ("other", [7] * 9), ("all", [*EIGHT, 9, 9, 9, 9, 1])):
        stage.submit(request(name, prompt, 1))
        stage.run_dry()
    assert (tiers(stage, "one"), tiers(stage, "other")) == ((0, 0, 8), (0, 0, 0))
    assert tiers(stage, "all") == (4, 4, 4)
    stage.submit(request("again", [*EIGHT, 9, 9, 9, 9, 2], 1))
    stage.run_dry()
    assert tiers(stage, "again") == (12, 0, 0)


def test_what_the_store_brought_once_lies_in_host_memory_from_then_on() -> None:
    stage = engine(filled(EIGHT), pool_blocks=4)
    for name, prompt in (("one", ASKS_FOR_EIGHT), ("other", [7] * 15), ("again", ASKS_FOR_EIGHT)):
        stage.submit(request(name, prompt, 1))
        stage.run_dry()
    assert tiers(stage, "one") == (0, 0, 8)
    assert tiers(stage, "again") == (0, 8, 0)


def test_what_came_from_the_store_is_not_written_there_again() -> None:
    second = engine(filled(EIGHT))
    second.submit(request("again", ASKS_FOR_EIGHT, 1))
    second.run_dry()
    second.put_all()
    assert second.scheduler.load(0.0).store_put_tokens_total == 0


def test_other_weights_and_other_salts_find_nothing() -> None:
    store = filled(EIGHT)
    for stage, salt in ((engine(store, weights="others"), None), (engine(store), "tenant")):
        stage.submit(request("again", ASKS_FOR_EIGHT, 1, salt=salt))
        stage.run_dry()
        assert stage.cached("again") == 0
        assert not stage.follower.host


def test_a_block_that_is_wrong_is_computed_and_so_is_what_follows_it() -> None:
    store = filled([*EIGHT, 9, 9, 9, 9])
    store.rotten.add(list(store.blocks)[1])
    second = engine(store)
    second.submit(request("again", [*EIGHT, 9, 9, 9, 9, 1], 1))
    second.run_dry()
    assert second.cached("again") == 4
    assert len(second.follower.host) == 1


def test_a_block_that_is_gone_after_the_look_is_computed() -> None:
    store = filled(EIGHT)
    second = engine(store)
    second.submit(request("again", ASKS_FOR_EIGHT, 1))
    second.start_ask()
    second.finish_ask()
    second.start_ask()
    assert isinstance(second.ask, FetchPlan)
    store.blocks.clear()
    second.finish_ask()
    second.run_dry()
    assert second.cached("again") == 0
    assert second.ended("again") is not None


def test_a_long_prefix_comes_in_pieces_and_the_prompt_waits_for_all_of_them() -> None:
    prompt = [number % 40 for number in range(40 * 4)]
    store = ToyStore()
    first = engine(store, host_blocks=60, pool_blocks=60)
    first.submit(request("first", prompt, 1))
    first.run_dry()
    first.put_all()
    second = engine(store, host_blocks=60, pool_blocks=60)
    second.submit(request("again", prompt, 1))
    pieces = []
    while second.start_ask():
        assert not second.start_step()
        pieces.append(len(second.asked))
        second.finish_ask()
    assert pieces == [39, 32, 7]
    second.run_dry()
    assert second.cached("again") == 39 * 4


def test_host_memory_too_small_for_all_of_it_takes_what_it_can() -> None:
    second = engine(filled([*EIGHT, 9, 9, 9, 9]), host_blocks=2)
    second.submit(request("again", [*EIGHT, 9, 9, 9, 9, 1], 1))
    second.run_dry()
    assert second.cached("again") == 8


def test_a_request_that_needs_nothing_from_the_store_overtakes_one_that_waits_for_it() -> None:
    second = engine(filled(EIGHT))
    second.submit(request("far", ASKS_FOR_EIGHT, 1))
    second.start_ask()
    second.submit(request("near", [1, 2], 1))
    second.step()
    assert second.ended("near") is not None
    assert second.ended("far") is None


def test_a_store_that_is_late_costs_its_time_once_and_is_left_alone_then() -> None:
    second = engine(filled(EIGHT))
    second.submit(request("waits", ASKS_FOR_EIGHT, 1))
    second.start_ask()
    assert not second.start_step()
    second.pass_time(1.0)
    while second.step():
        pass
    assert second.cached("waits") == 0
    second.submit(request("does not", [9] * 8, 1))
    assert second.step()
    second.finish_ask()
    second.pass_time(REST_S)
    second.submit(request("asks again", [8] * 8, 1))
    assert second.start_ask()


def test_an_answer_that_comes_too_late_is_still_of_use_to_the_next() -> None:
    second = engine(filled([*EIGHT, 9, 9, 9, 9]))
    second.submit(request("waits", [*EIGHT, 9, 9, 9, 9, 1], 1))
    second.start_ask()
    second.finish_ask()
    second.start_ask()
    second.abort("waits")
    second.finish_ask()
    assert len(second.follower.host) == 3
    second.submit(request("next", [*EIGHT, 9, 9, 9, 9, 1], 1))
    assert second.step()
    assert second.cached("next") == 12


def test_a_flush_waits_for_a_fetch_and_names_it() -> None:
    second = engine(filled(EIGHT))
    second.submit(request("gone", ASKS_FOR_EIGHT, 1))
    second.start_ask()
    second.finish_ask()
    second.start_ask()
    second.abort("gone")
    second.flush("now")
    assert blockers(second, "now") == [("prefetching", 2)]
    second.flush("soon", 1.0)
    second.finish_ask()
    assert second.answer("soon").done
    assert not second.follower.host


def test_a_flush_waits_for_a_put_begins_no_other_and_leaves_the_store_as_it_is() -> None:
    store = ToyStore()
    stage = engine(store)
    stage.submit(request("first", EIGHT, 1))
    stage.run_dry()
    stage.write_all()
    stage.start_put()
    stage.flush("now")
    assert blockers(stage, "now") == [("storing", 2)]
    stage.flush("soon", 1.0)
    stage.finish_put()
    assert stage.answer("soon").done
    assert not stage.start_put()
    assert len(store.blocks) == 2
    stage.submit(request("again", ASKS_FOR_EIGHT, 1))
    stage.run_dry()
    assert stage.cached("again") == 8


def test_a_flush_that_holds_keeps_later_requests_from_the_store() -> None:
    stage = engine(filled(EIGHT))
    stage.submit(request("busy", [2, 2], 20))
    stage.step()
    stage.flush("held", 9.0, hold=True)
    stage.submit(request("later", ASKS_FOR_EIGHT, 1))
    assert not stage.start_ask()
    stage.run_dry()
    assert stage.answer("held").done
    assert stage.cached("later") == 8


def test_what_the_store_does_not_take_is_counted_and_not_tried_again() -> None:
    store = ToyStore(full=True)
    stage = engine(store)
    stage.submit(request("first", EIGHT, 1))
    stage.run_dry()
    stage.put_all()
    load = stage.scheduler.load(0.0)
    assert (load.store_put_tokens_total, load.store_failed_puts_total) == (0, 2)
    assert not stage.start_put()


def test_nothing_is_asked_of_a_store_for_what_is_known_here() -> None:
    stage = engine(filled(EIGHT))
    stage.submit(request("first", ASKS_FOR_EIGHT, 1))
    stage.run_dry()
    stage.submit(request("again", ASKS_FOR_EIGHT, 1))
    assert not stage.start_ask()
    stage.submit(request("more", [*EIGHT, 5, 5, 5, 5, 1], 1))
    stage.start_ask()
    assert isinstance(stage.ask, LookPlan)
    assert len(stage.ask.names) == 1


def test_without_a_host_tier_there_is_no_store() -> None:
    stage = engine(filled(EIGHT), host_blocks=0)
    stage.submit(request("first", ASKS_FOR_EIGHT, 1))
    assert not stage.start_ask()
    stage.run_dry()
    assert stage.cached("first") == 0


def test_a_block_that_is_written_while_the_store_brings_it_has_one_copy() -> None:
    stage = engine(ToyStore())
    stage.submit(request("first", EIGHT, 1))
    stage.run_dry()
    stage.start_write()
    stage.store.blocks.update(filled([*EIGHT, 9, 9, 9, 9]).blocks)
    stage.submit(request("longer", [*EIGHT, 9, 9, 9, 9, 1], 1))
    stage.run_dry()
    assert stage.scheduler.load(0.0).store_fetched_tokens_total == 12
    stage.finish_write()
    assert stage.cached("longer") == 12
    assert len(stage.follower.host) == 3
    assert stage.scheduler.load(0.0).host_used_tokens == 12


def test_the_time_of_a_request_counts_from_when_it_came_and_that_of_the_store_from_when_it_was_asked() -> None:
    stage = engine(filled(EIGHT))
    stage.submit(request("waits", ASKS_FOR_EIGHT, 1))
    stage.pass_time(0.5)
    stage.start_ask()
    stage.pass_time(0.5)
    assert stage.step()
    assert stage.cached("waits") == 0
    stage.finish_ask()
    stage.submit(request("next", [8] * 8, 1))
    assert stage.start_ask()
