"""SGLang's KV events, and what vLLM's offloading says of other tiers: as recorded and as imagined."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvherd.core.errors import FrameInvalid
from kvherd.core.ids import EngineHash, Rank
from kvherd.core.kv.bigrams import bigram_key
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch, Tier
from kvherd.core.kv.live_state import LiveState
from kvherd.core.kv.stream import BatchUntranslatable
from kvherd.testing.recordings import read_recording
from kvherd.wire.kv_pb import KvPbDecoder, encode_item
from kvherd.wire.vllm_kv import KvDecoder, decode_batch, encode_batch

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sglang-0.5.23-radix"
NAMES = ["pages", "pages4", "bigrams", "bigrams4"]
pack = msgspec.msgpack.encode
PAGES = {"type": "BlockStored", "block_hashes": [-7, 8], "parent_block_hash": -1, "token_ids": [1, 2], "block_size": 1}
PAIRS = {**PAGES, "token_ids": [[1, 2], [2, 3]], "lora_id": None, "medium": "GPU"}


def events_of(*events: object, known: LiveState | None = None) -> tuple[KvEvent, ...]:
    return KvDecoder().decode(pack([1.5, list(events), 0]), known).events


def store_of(event: object) -> BlocksStored:
    (store,) = events_of(event)
    assert isinstance(store, BlocksStored)
    return store


@pytest.mark.parametrize("name", NAMES)
def test_recorded_batches_survive_every_way_they_are_passed_on(name: str) -> None:
    over_grpc = KvPbDecoder()
    kinds = set()
    for number, one in enumerate(read_recording(FIXTURES / f"{name}.bin"), start=1):
        assert one.sequence == number - 1
        batch = decode_batch(one.payload)
        kinds |= set(map(type, batch.events))
        passed = KvEventBatch(number, batch.timestamp_s, Rank(0), batch.events)
        assert over_grpc.decode(encode_item(passed)) == passed
        for event in batch.events:
            if isinstance(event, BlocksStored):
                assert event.block_size == (4 if "4" in name else 1)
                assert bool(event.extra_keys) == name.startswith("bigrams")
                assert event.salt in (None, "tenant-2")
    assert kinds == {BlocksStored, BlocksRemoved, CacheCleared}


def test_pages_of_one_token_have_signed_hashes() -> None:
    assert store_of(PAGES) == BlocksStored(
        (EngineHash(2**64 - 7), EngineHash(8)), EngineHash(2**64 - 1), (1, 2), 1, Tier.DEVICE
    )
    assert events_of({"type": "BlockRemoved", "block_hashes": [-7], "medium": "GPU"}) == (
        BlocksRemoved((EngineHash(2**64 - 7),)),
    )


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("GPU", Tier.DEVICE),
        ("CPU_PINNED", Tier.HOST),
        ("DISK", Tier.DISK),
        ("EXTERNAL", Tier.EXTERNAL),
        ("L9", Tier.EXTERNAL),
    ],
)
def test_media_are_tiers(medium: str, tier: Tier) -> None:
    assert store_of({**PAGES, "medium": medium}).tier is tier


def test_salt_and_adapter_come_by_name_and_the_session_does_not_matter() -> None:
    store = store_of({**PAGES, "cache_salt": "s", "lora_name": "l", "session_id": "x"})
    assert (store.salt, store.lora, store.extra_keys) == ("s", "l", ())


def test_pairs_are_first_tokens_and_the_last_next_one_of_each_block() -> None:
    one = store_of(PAIRS)
    assert (one.token_ids, one.extra_keys) == ((1, 2), ((bigram_key(2),), (bigram_key(3),)))
    two = store_of({**PAIRS, "block_hashes": [5], "block_size": 2})
    assert (two.token_ids, two.extra_keys) == ((1, 2), ((bigram_key(3),),))
    keyed = store_of({**PAIRS, "extra_keys": [["x"], None]})
    assert keyed.extra_keys == (("x", bigram_key(2)), (bigram_key(3),))


def test_the_array_layout_has_pairs_too() -> None:
    assert events_of(["BlockStored", [-7, 8], -1, [[1, 2], [2, 3]], 1, None, "GPU"]) == events_of(PAIRS)


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({**PAIRS, "token_ids": [[1, 2], [3, 4]]}, "do not follow"),
        ({**PAIRS, "token_ids": [[1, 2], 2]}, "token_ids"),
        ({**PAIRS, "token_ids": [1, [2, 3]]}, "token_ids"),
        ({**PAIRS, "token_ids": [[1, 2], [2]]}, "token_ids"),
        ({**PAIRS, "token_ids": [[1, 2], [2, -3]]}, "token_ids"),
        ({**PAIRS, "token_ids": [[1, 2]]}, "2 blocks of 1 tokens with 1"),
        ({**PAGES, "token_ids": []}, "with 0 tokens"),
        ({**PAGES, "block_hashes": [True, 8]}, "block_hashes"),
        ([], "object"),
        ([["BlockStored"]], "object"),
        (["BlockMoved", 1], "BlockMoved"),
    ],
)
def test_what_would_corrupt_is_refused_and_named(event: object, says: str) -> None:
    with pytest.raises(BatchUntranslatable, match=says):
        events_of(event)


# --- what vLLM's offloading says of other tiers --------------------------------------------------------------

OFFLOADED = {
    "type": "BlockStored",
    "block_hashes": [7],
    "parent_block_hash": None,
    "token_ids": [],
    "block_size": 0,
    "lora_id": None,
    "medium": "CPU",
    "lora_name": None,
    "group_idx": 0,
}


def knowing_seven() -> tuple[LiveState, BlocksStored]:
    state = LiveState()
    seven = BlocksStored((EngineHash(7),), None, (1, 2), 2, salt="s", extra_keys=((("image", 3),),))
    state.apply([seven])
    return state, seven


def test_a_block_that_is_only_named_is_the_one_that_is_known() -> None:
    state, seven = knowing_seven()
    (host,) = events_of(OFFLOADED, known=state)
    assert host == BlocksStored((EngineHash(7),), None, (1, 2), 2, Tier.HOST, salt="s", extra_keys=seven.extra_keys)


def test_a_block_that_is_only_named_and_not_known_says_nothing() -> None:
    assert events_of({**OFFLOADED, "block_hashes": [9]}, known=knowing_seven()[0]) == ()
    assert events_of({**OFFLOADED, "block_size": 16}) == ()


def test_a_self_describing_store_without_its_extra_keys_does_not_lose_a_salt() -> None:
    described = {**OFFLOADED, "token_ids": [1, 2], "block_size": 2, "kv_cache_spec_kind": "full_attention"}
    (host,) = events_of(described, known=knowing_seven()[0])
    assert isinstance(host, BlocksStored)
    assert (host.salt, host.tier) == ("s", Tier.HOST)
    assert events_of(described) == (), "its name could be a wrong one"


def test_a_device_block_must_be_described() -> None:
    with pytest.raises(BatchUntranslatable, match="block size 0"):
        events_of({**OFFLOADED, "medium": "GPU"}, known=knowing_seven()[0])


def test_groups_that_do_not_count_are_left_out_in_every_tier() -> None:
    window = {**OFFLOADED, "group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    assert events_of(window, {**OFFLOADED, "group_idx": 1}, known=knowing_seven()[0]) == ()


def test_the_first_of_several_full_attention_groups_speaks_and_any_may_take_away() -> None:
    full = {**PAGES, "kv_cache_spec_kind": "full_attention"}
    gone = {"type": "BlockRemoved", "block_hashes": [8]}
    events = events_of(
        *({**full, "group_idx": group} for group in (1, 2, 1)), *({**gone, "group_idx": n} for n in (1, 2))
    )
    assert [type(event) for event in events] == [BlocksStored, BlocksStored, BlocksRemoved, BlocksRemoved]


# --- any input -----------------------------------------------------------------------------------------------

tokens = st.integers(-1, 2**32) | st.sampled_from([1, 2, 3])
json = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=4)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
FIELDS = [*PAIRS, "cache_salt", "session_id", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "locality"]
values = json | st.lists(st.tuples(tokens, tokens), max_size=3) | st.lists(tokens, max_size=3)
events = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), values).map(lambda some: {**PAGES, **some}),
    st.dictionaries(st.sampled_from(FIELDS), values).map(lambda some: {**PAIRS, **some}),
    st.lists(values, max_size=11).map(lambda some: ["BlockStored", *some]),
    st.lists(values, max_size=4).map(lambda some: ["BlockRemoved", *some]),
    st.just({"type": "AllBlocksCleared"}),
    json,
)


def check(payload: bytes) -> None:
    """Whatever is let through can be passed on and told again."""
    state = LiveState()
    try:
        batch = KvDecoder().decode(payload, state)
    except (FrameInvalid, BatchUntranslatable):
        return
    state.apply(batch.events)
    list(state.retell(1_000))
    passed = KvEventBatch(5, batch.timestamp_s, Rank(0), batch.events)
    if passed.timestamp_s == passed.timestamp_s:
        assert KvPbDecoder().decode(encode_item(passed)) == passed
    encode_batch(1.0, batch.events, Rank(0))


@settings(max_examples=600, deadline=None)
@given(st.lists(events, max_size=3), json, json)
def test_no_fields_raise_anything_but_the_decoder_s_own_errors(some: list[Any], stamp: object, rank: object) -> None:
    check(pack([1.5, some, 0]))
    check(pack([stamp, some, rank]))


RECORDED = [one.payload for name in NAMES for one in read_recording(FIXTURES / f"{name}.bin")]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(RECORDED),
    st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=3)), min_size=1, max_size=4),
)
def test_no_damage_to_recorded_bytes_raises_anything_else(payload: bytes, damage: list[tuple[int, bytes]]) -> None:
    for anywhere, put in damage:
        place = anywhere % max(1, len(payload))
        payload = payload[:place] + put + payload[place + 1 :]
        check(payload)
