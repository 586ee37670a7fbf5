"""KV events in the field's protobuf, and what travels beside them."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2 as pb

from kvherd.core.errors import FieldInvalid
from kvherd.core.ids import EngineHash, Epoch, Rank
from kvherd.core.kv.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    ExtraKey,
    KvEvent,
    KvEventBatch,
    SnapshotChunk,
    Tier,
)
from kvherd.core.kv.stream import (
    BatchUntranslatable,
    EpochEnded,
    EventsUnsupported,
    ResumeOutOfRange,
    StreamBroken,
    StreamForbidden,
    StreamUntranslatable,
    SubscriberTooSlow,
)
from kvherd.wire.kv_pb import KvPbDecoder, SubscribeCall, decode_subscribe, encode_item, encode_subscribe, epoch_in
from kvherd.wire.kv_status import stream_error
from kvherd.wire.status import status_of

hashes = st.integers(0, 2**64 - 1).map(EngineHash)
tiers = st.sampled_from(list(Tier))
numbers = st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=5)


@st.composite
def stores(draw: st.DrawFn) -> BlocksStored:
    count, size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    parent = draw(st.none() | hashes)
    # Beside a parent any text is kept; at the root a text would be a salt, which has its own field.
    key: st.SearchStrategy[ExtraKey] = numbers | st.binary(max_size=5) | st.tuples(texts, numbers)
    extra = draw(st.lists(st.lists(key, max_size=2).map(tuple), min_size=count, max_size=count))
    return BlocksStored(
        block_hashes=tuple(draw(st.lists(hashes, min_size=count, max_size=count))),
        parent_hash=parent,
        token_ids=tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=count * size, max_size=count * size))),
        block_size=size,
        tier=draw(tiers),
        lora=draw(st.none() | texts),
        salt=draw(st.none() | texts),
        extra_keys=tuple(extra) if any(extra) else (),
    )


removals = st.builds(BlocksRemoved, st.lists(hashes, max_size=4).map(tuple), tiers)
batches = st.builds(
    KvEventBatch,
    st.integers(0, 2**62),
    st.floats(0, 1e10),
    st.integers(0, 7).map(Rank),
    st.lists(st.one_of(stores(), removals, st.just(CacheCleared())), max_size=3).map(tuple),
)
chunks = st.builds(SnapshotChunk, st.integers(0, 3), st.integers(4, 9), st.integers(0, 2**40), batches)


@given(st.one_of(batches, chunks))
def test_what_is_written_is_read_back_alike(item: KvEventBatch | SnapshotChunk) -> None:
    sent = encode_item(item).SerializeToString()
    assert KvPbDecoder().decode(pb.KvEventBatch.FromString(sent)) == item


def test_a_message_of_load_alone_carries_no_batch() -> None:
    message = pb.KvEventBatch(sequence_number=7, load=pb.EngineLoad(running_requests=1, load_only=True))
    assert KvPbDecoder().decode(message) is None
    message.load.load_only = False
    assert KvPbDecoder().decode(message) == KvEventBatch(7, 0.0, Rank(0), ())


def test_a_snapshot_counts_its_blocks() -> None:
    store = BlocksStored((EngineHash(1), EngineHash(2)), None, (1, 2), 1)
    message = encode_item(SnapshotChunk(0, 1, 3, KvEventBatch(9, 0.0, Rank(0), (CacheCleared(), store))))
    assert (message.snapshot.blocks, message.snapshot.unknown_before) == (2, 3)


def foreign(**fields: object) -> tuple[KvEvent, ...]:
    stored = pb.KvBlocksStored(
        blocks=[pb.KvBlock(block_hash=-1, token_ids=[1, 2], block_size=2)],
        **fields,  # type: ignore[arg-type, unused-ignore]
    )
    batch = KvPbDecoder().decode(pb.KvEventBatch(sequence_number=1, events=[pb.KvCacheEvent(stored=stored)]))
    assert isinstance(batch, KvEventBatch)
    return batch.events


def test_what_foreign_servicers_send_is_understood() -> None:
    assert foreign() == (BlocksStored((EngineHash(2**64 - 1),), None, (1, 2), 2),)
    assert foreign(medium="CPU_PINNED")[0].tier is Tier.HOST  # type: ignore[union-attr]
    assert foreign(medium="NEW")[0].tier is Tier.EXTERNAL  # type: ignore[union-attr]
    assert foreign(tier=pb.KV_CACHE_TIER_DISK)[0].tier is Tier.DISK  # type: ignore[union-attr]
    assert foreign(locality=pb.KV_CACHE_LOCALITY_REMOTE) == ()
    assert foreign(group_idx=1, kv_cache_spec_kind="sliding_window") == ()


def test_a_removal_may_tell_its_tier_by_level() -> None:
    removed = pb.KvBlocksRemoved(block_hashes=[5], cache_level=1)
    batch = KvPbDecoder().decode(pb.KvEventBatch(events=[pb.KvCacheEvent(removed=removed)]))
    assert isinstance(batch, KvEventBatch)
    assert batch.events == (BlocksRemoved((EngineHash(5),), Tier.HOST),)


@pytest.mark.parametrize(
    "event",
    [
        pb.KvCacheEvent(),
        pb.KvCacheEvent(stored=pb.KvBlocksStored(blocks=[pb.KvBlock(block_hash=1, token_ids=[1], block_size=2)])),
        pb.KvCacheEvent(stored=pb.KvBlocksStored(blocks=[pb.KvBlock(block_hash=1, block_size=0)])),
        pb.KvCacheEvent(stored=pb.KvBlocksStored(blocks=[pb.KvBlock(token_ids=[1], block_size=1)], group_idx=2)),
        pb.KvCacheEvent(
            stored=pb.KvBlocksStored(
                blocks=[pb.KvBlock(token_ids=[1], block_size=1, extra_keys=[pb.KvBlockExtraKey()])]
            )
        ),
    ],
)
def test_what_cannot_be_repeated_is_refused(event: pb.KvCacheEvent) -> None:
    with pytest.raises(BatchUntranslatable):
        KvPbDecoder().decode(pb.KvEventBatch(events=[event]))


@given(st.binary(max_size=80))
def test_no_message_raises_anything_else(raw: bytes) -> None:
    message = pb.KvEventBatch()
    try:
        message.ParseFromString(raw)
        KvPbDecoder().decode(message)
    except (BatchUntranslatable, DecodeError):
        return


def test_cursors_travel_as_metadata_and_a_single_one_as_the_start_too() -> None:
    epoch = Epoch("ab" * 16)
    for cursors in ({}, {Rank(0): 2**61}, {Rank(1): 7, Rank(0): 9}):
        start, metadata = encode_subscribe(cursors, epoch)
        assert start == (2**61 if len(cursors) == 1 else 0)
        assert decode_subscribe(start, metadata) == SubscribeCall(start, cursors, epoch)
        assert epoch_in(metadata) == epoch
    assert epoch_in(None) is None


@pytest.mark.parametrize("value", ["0", "a=1", "0=-1", "0=1,", "1=2=3", "²=1", "0=" + "9" * 5000])
def test_cursors_of_another_form_are_refused_by_name(value: str) -> None:
    if value == "0=1,":
        assert decode_subscribe(0, [("kvherd-cursors", value)]).cursors == {Rank(0): 1}
        return
    with pytest.raises(FieldInvalid, match="kvherd-cursors"):
        decode_subscribe(0, [("kvherd-cursors", value)])


@pytest.mark.parametrize(
    "error",
    [
        EventsUnsupported("r"),
        ResumeOutOfRange("r"),
        StreamForbidden("r"),
        EpochEnded("r"),
        SubscriberTooSlow("r"),
        StreamUntranslatable("r"),
        StreamBroken("r"),
    ],
)
def test_every_end_of_a_stream_survives_its_status(error: Exception) -> None:
    read = stream_error(status_of(error).grpc, str(error))
    assert type(read) is type(error)
    # no sentence is put around itself again; of a broken connection the status is told too
    broken = str(StreamBroken(f"UNAVAILABLE: {error}"))
    assert str(read) == (broken if isinstance(error, StreamBroken) else str(error))


def test_statuses_of_no_meaning_here_are_broken_connections() -> None:
    assert isinstance(stream_error("INTERNAL", "x"), StreamBroken)
    assert isinstance(stream_error("UNAUTHENTICATED", "x"), StreamForbidden)
    refused = stream_error("OUT_OF_RANGE", "x", Epoch("e"))
    assert isinstance(refused, ResumeOutOfRange)
    assert refused.epoch == "e"
