"""The publisher against bare ZMQ sockets in the same thread: nothing else moves while a test looks."""

from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from kvherd.core.errors import PortInUse, StartFailed
from kvherd.core.ids import Rank
from kvherd.core.kv.events import CacheCleared
from kvherd.runtime.kv_publisher import END_OF_REPLAY, KvPublisher

pytestmark = pytest.mark.net


class Readers:
    """Every socket a test opens, so that none is left open."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self._peers: list[zmq.Socket[bytes]] = []

    def ask(self, of: KvPublisher, *question: bytes) -> zmq.Socket[bytes]:
        peer = self.context.socket(zmq.DEALER)
        self._peers.append(peer)
        peer.rcvhwm = 10  # as slow a reader as can be: what does not fit waits at the publisher
        peer.connect(of.replay_endpoint)
        peer.send_multipart(list(question))
        assert of.replay_socket.poll(5000)
        return peer

    def close(self) -> None:
        for peer in self._peers:
            peer.close(linger=0)
        self.context.term()


@pytest.fixture
def readers() -> Iterator[Readers]:
    with closing(Readers()) as readers:
        yield readers


def publisher(readers: Readers, *, kept: int = 10_000, events: str = "tcp://127.0.0.1:0") -> KvPublisher:
    return KvPublisher(
        readers.context,
        Rank(0),
        events_endpoint=events,
        replay_endpoint="tcp://127.0.0.1:0",
        topic="kv-events",
        kept_batches=kept,
        port_option="--port",
    )


def answer(of: KvPublisher, peer: zmq.Socket[bytes]) -> list[int]:
    """The sequences of one whole answer."""
    sequences: list[int] = []
    while True:
        of.serve_replays()
        if not peer.poll(5000):
            raise AssertionError(f"the answer stopped after {len(sequences)} batches")
        while peer.poll(0):
            delimiter, topic, sequence, _payload = peer.recv_multipart()
            assert delimiter == b""
            if sequence == END_OF_REPLAY:
                assert topic == b""
                return sequences
            sequences.append(int.from_bytes(sequence, "big"))


def test_everything_kept_arrives_in_order_at_a_slow_reader(readers: Readers) -> None:
    with closing(publisher(readers)) as ours:
        for _ in range(6000):
            ours.publish(0.0, (CacheCleared(),))
        peer = readers.ask(ours, b"", (7).to_bytes(8, "big"))
        assert answer(ours, peer) == list(range(7, 6000))


def test_a_start_older_than_what_is_kept_begins_at_the_oldest(readers: Readers) -> None:
    with closing(publisher(readers, kept=3)) as ours:
        for _ in range(10):
            ours.publish(0.0, (CacheCleared(),))
        assert answer(ours, readers.ask(ours, b"", bytes(8))) == [7, 8, 9]


def test_what_is_dropped_while_a_replay_is_sent_is_still_in_that_replay(readers: Readers) -> None:
    with closing(publisher(readers, kept=1200)) as ours:
        for _ in range(1200):
            ours.publish(0.0, (CacheCleared(),))
        peer = readers.ask(ours, b"", bytes(8))
        ours.serve_replays()
        assert ours.replaying
        for _ in range(1200):
            ours.publish(0.0, (CacheCleared(),))
        assert answer(ours, peer) == list(range(1200))
        assert not ours.replaying


@pytest.mark.parametrize("first", [10, 11, 2**63, 2**64 - 1])
def test_a_start_in_the_future_is_only_the_end_marker(readers: Readers, first: int) -> None:
    with closing(publisher(readers)) as ours:
        for _ in range(10):
            ours.publish(0.0, (CacheCleared(),))
        assert answer(ours, readers.ask(ours, b"", first.to_bytes(8, "big"))) == []


@pytest.mark.parametrize("question", [(b"",), (b"", b"", bytes(8)), (b"", b"short"), (bytes(8),)])
def test_a_question_of_another_shape_gets_no_answer_and_does_no_harm(
    readers: Readers, question: tuple[bytes, ...]
) -> None:
    with closing(publisher(readers)) as ours:
        ours.publish(0.0, (CacheCleared(),))
        peer = readers.ask(ours, *question)
        ours.serve_replays()
        assert not ours.replaying
        peer.send_multipart([b"", bytes(8)])
        assert ours.replay_socket.poll(5000)
        assert answer(ours, peer) == [0]


def test_a_port_in_use_is_named_with_the_option(readers: Readers) -> None:
    with closing(publisher(readers)) as ours:
        port = int(ours.events_endpoint.rpartition(":")[2])
        with pytest.raises(PortInUse, match=f"port {port} is in use; choose another with --port"):
            publisher(readers, events=ours.events_endpoint)


def test_an_address_that_is_not_this_machines_is_said(readers: Readers) -> None:
    with pytest.raises(StartFailed, match=r"tcp://203\.0\.113\.1:9"):
        publisher(readers, events="tcp://203.0.113.1:9")
