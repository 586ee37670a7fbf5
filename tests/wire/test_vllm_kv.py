"""vLLM's KV events, as recorded and as imagined."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvherd.core.errors import FrameInvalid
from kvherd.core.ids import EngineHash, Rank
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, Tier
from kvherd.core.kv.stream import BatchUntranslatable
from kvherd.testing.recordings import read_recording
from kvherd.wire.vllm_kv import KvDecoder, decode_batch, encode_batch

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm-0.32"
pack = msgspec.msgpack.encode
STORED = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}


def events_of(*events: object, rank: object = 0) -> tuple[KvEvent, ...]:
    return decode_batch(pack([1.5, list(events), rank])).events


@pytest.mark.parametrize(
    ("name", "messages", "events"),
    [("first", 4, 4), ("evict_clear", 95, 134), ("restart", 47, 86), ("bytes_lora", 23, 166), ("dp_rank0", 5, 6)],
)
def test_recorded_batches_are_read_and_written_again_alike(name: str, messages: int, events: int) -> None:
    decoder = KvDecoder()
    seen = [decoder.decode(one.payload) for one in read_recording(FIXTURES / f"{name}.bin")]
    assert (len(seen), sum(len(batch.events) for batch in seen)) == (messages, events)
    for batch in seen:
        assert batch.rank == 0
        assert decode_batch(encode_batch(batch.timestamp_s, batch.events, Rank(0))) == batch


def test_what_is_written_is_byte_for_byte_what_vllm_writes() -> None:
    for name in ("first", "evict_clear", "dp_rank0", "reset_then_req"):
        for one in read_recording(FIXTURES / f"{name}.bin"):
            batch = decode_batch(one.payload)
            ours = msgspec.msgpack.decode(encode_batch(batch.timestamp_s, batch.events, Rank(0)))
            assert ours == msgspec.msgpack.decode(one.payload)


def test_adapters_and_salts_of_a_recording_are_told_apart() -> None:
    stores = [
        event
        for one in read_recording(FIXTURES / "bytes_lora.bin")
        for event in decode_batch(one.payload).events
        if isinstance(event, BlocksStored)
    ]
    assert {event.lora for event in stores} == {None, "alpha", "beta"}
    assert ("alpha", "s1") in {(event.lora, event.salt) for event in stores}
    assert all(event.extra_keys == () for event in stores)


def test_arrays_of_older_versions_with_trailing_defaults_left_out() -> None:
    stored = ["BlockStored", [2**64 - 1, 5], 3, [1, 2, 3, 4], 2, None, "GPU"]
    assert events_of(stored, ["BlockRemoved", [-1], "CPU"], ["AllBlocksCleared"]) == (
        BlocksStored((EngineHash(2**64 - 1), EngineHash(5)), EngineHash(3), (1, 2, 3, 4), 2),
        BlocksRemoved((EngineHash(2**64 - 1),), Tier.HOST),
        CacheCleared(),
    )


def test_a_digest_is_known_by_its_last_eight_bytes() -> None:
    (event,) = events_of({**STORED, "block_hashes": [bytes(24) + (9).to_bytes(8, "big")]})
    assert isinstance(event, BlocksStored)
    assert event.block_hashes == (9,)


def test_unknown_keys_are_ignored_and_the_rank_may_be_absent() -> None:
    batch = decode_batch(pack([1, [{**STORED, "novelty": {"a": 1}}]]))
    assert batch.rank is None
    assert len(batch.events) == 1


def test_a_salt_is_what_is_left_on_the_first_block_of_a_prompt() -> None:
    two = {**STORED, "block_hashes": [7, 8], "token_ids": [1, 2, 3, 4], "lora_name": "alpha"}
    (event,) = events_of({**two, "extra_keys": [["alpha", ["image", 3], "s1"], ["alpha"]]})
    assert isinstance(event, BlocksStored)
    assert (event.lora, event.salt, event.extra_keys) == ("alpha", "s1", ((("image", 3),), ()))


def test_a_text_that_could_be_anything_stays_in_the_key_and_gets_no_credit() -> None:
    (event,) = events_of({**STORED, "parent_block_hash": 1, "extra_keys": [["what"]]})
    assert isinstance(event, BlocksStored)
    assert (event.salt, event.extra_keys) == (None, (("what",),))


def test_groups_that_do_not_speak_for_prefixes_are_left_out_with_their_removals() -> None:
    window = {**STORED, "group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    gone = {"type": "BlockRemoved", "block_hashes": [7], "group_idx": 1}
    assert events_of(window, gone) == ()
    full = {**STORED, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    assert len(events_of(full, {**gone, "group_idx": 0})) == 2
    assert len(events_of(gone)) == 1


def test_blocks_of_a_shared_pool_say_nothing_of_this_engine() -> None:
    assert events_of({**STORED, "locality": "REMOTE"}) == ()


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({**STORED, "token_ids": [1]}, "1 blocks of 2 tokens with 1"),
        ({**STORED, "token_ids": None}, "token_ids"),
        ({**STORED, "token_ids": [[1, 2], 3]}, "token_ids"),
        ({**STORED, "token_ids": [-1, 2]}, "token_ids"),
        ({**STORED, "block_size": 0, "token_ids": []}, "block size 0"),
        ({**STORED, "block_hashes": [None]}, "block_hashes"),
        ({**STORED, "block_hashes": [b"abc"]}, "3 bytes"),
        ({**STORED, "extra_keys": [None, None]}, "extra keys for 2"),
        ({**STORED, "extra_keys": [[True]]}, "truth value"),
        ({**STORED, "extra_keys": [[{}]]}, "type dict"),
        ({**STORED, "group_idx": 1}, "cache group 1"),
        ({"type": "BlockMoved"}, "BlockMoved"),
        ({"type": "BlockRemoved"}, "block_hashes"),
        (["BlockRemoved"], "block_hashes"),
        (7, "object"),
    ],
)
def test_what_cannot_be_repeated_is_refused_and_named(event: object, says: str) -> None:
    with pytest.raises(BatchUntranslatable, match=says):
        events_of(event)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93", pack([1.5, [STORED], 0])[:-3], b"\x91" * 5_000])
def test_bytes_that_are_no_msgpack_are_another_error(payload: bytes) -> None:
    with pytest.raises((FrameInvalid, BatchUntranslatable)):
        decode_batch(payload)
    if payload != b"\x91" * 5_000:
        with pytest.raises(FrameInvalid):
            decode_batch(payload)


GOOD = pack([1.5, [STORED, {"type": "BlockRemoved", "block_hashes": [1]}, ["AllBlocksCleared"]], 0])


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255))))
def test_no_bytes_raise_anything_else(raw: bytes | tuple[int, int]) -> None:
    payload = raw if isinstance(raw, bytes) else GOOD[: raw[0]] + bytes([raw[1]]) + GOOD[raw[0] + 1 :]
    try:
        batch = decode_batch(payload)
    except (FrameInvalid, BatchUntranslatable):
        return
    for event in batch.events:
        if isinstance(event, BlocksStored):
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size


json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=4) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from([*STORED, "extra_keys", "group_idx", "lora_id", "lora_name"]), json))
def test_no_fields_raise_anything_else(fields: dict[str, object]) -> None:
    try:
        events_of({**STORED, **fields})
    except (FrameInvalid, BatchUntranslatable):
        return


def test_a_store_without_its_hashes_is_refused_and_one_of_no_blocks_says_nothing() -> None:
    store = {"type": "BlockStored", "parent_block_hash": 3, "token_ids": [], "block_size": 4}
    with pytest.raises(BatchUntranslatable, match="block_hashes"):
        decode_batch(msgspec.msgpack.encode([1.0, [store], 0]))
    assert decode_batch(msgspec.msgpack.encode([1.0, [store | {"block_hashes": []}], 0])).events == ()
