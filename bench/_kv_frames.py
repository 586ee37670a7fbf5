"""An engine that stores and removes chains of blocks, in vLLM's frames over ZeroMQ, as fast as it can or at a rate."""

import json
import sys
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import zmq

SIZE, CHAIN, KEPT = 16, 64, 200
MARKER = -1
MARK_EVERY_S = 0.5


@cache
def tokens_of(chain: int) -> list[int]:
    return [(chain * 7919 + position * 31) % 50_000 if position else chain + 2 for position in range(CHAIN * SIZE)]


def hashes_of(chain: int) -> list[int]:
    return [((chain + 2) * 1_000_003 + number) * 2_654_435_761 % 2**64 for number in range(CHAIN)]


def stored(chain: int, first: int, count: int) -> dict[str, Any]:
    hashes = hashes_of(chain)
    return {
        "type": "BlockStored",
        "block_hashes": hashes[first : first + count],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": tokens_of(chain)[first * SIZE : (first + count) * SIZE],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * count,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(chain: int, first: int, count: int) -> dict[str, Any]:
    hashes = hashes_of(chain)[first : first + count]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


def batches(blocks: int, batch: int) -> Iterator[list[dict[str, Any]]]:
    """The events of each batch; the last chain is whole at the end."""
    for chain in range(blocks // CHAIN):
        for first in range(0, CHAIN, batch):
            events = [stored(chain, first, batch)]
            if chain >= KEPT:
                events.append(removed(chain - KEPT, CHAIN - batch - first, batch))
            yield events


class Publisher:
    """One engine's two sockets; nothing is lost, for its queue to a slow reader has no end."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._pub, self.router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._pub.sndhwm = self.router.sndhwm = 0
        self.events = self._bind(self._pub)
        self.replay = self._bind(self.router)
        self._sent: list[bytes] = []

    @staticmethod
    def _bind(socket: zmq.Socket[bytes]) -> str:
        socket.bind("tcp://127.0.0.1:*")
        return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def send(self, payload: bytes) -> None:
        self._pub.send_multipart([b"kv-events", len(self._sent).to_bytes(8, "big"), payload])
        self._sent.append(payload)

    def answer_replays(self) -> None:
        while self.router.poll(0):
            asker, _, start = self.router.recv_multipart()
            first = int.from_bytes(start, "big")
            for number, payload in enumerate(self._sent[first:], start=first):
                self.router.send_multipart([asker, b"", b"kv-events", number.to_bytes(8, "big"), payload])
            self.router.send_multipart([asker, b"", b"", b"\xff" * 8, b""])


def payload(events: list[dict[str, Any]]) -> bytes:
    return msgspec.msgpack.encode([time.time(), events, 0])


def publish(blocks: int, batch: int, rate: float, seconds: float) -> None:
    """Say where, store a marker until told to go, then send everything, or so many batches a second."""
    publisher = Publisher()
    print(json.dumps([publisher.events, publisher.replay]), flush=True)
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    ready = [] if rate else [payload(events) for events in batches(blocks, batch)]
    poller.register(publisher.router, zmq.POLLIN)
    marked_s = 0.0
    while sys.stdin.fileno() not in dict(poller.poll(50)):
        publisher.answer_replays()  # sooner than there is more to tell, or a reader asks for ever
        if time.monotonic() > marked_s + MARK_EVERY_S:
            publisher.send(payload([removed(MARKER, 0, CHAIN), stored(MARKER, 0, CHAIN)]))
            marked_s = time.monotonic()
    sys.stdin.readline()
    for number, one in enumerate(ready):
        publisher.send(one)
        if number % 64 == 0:
            publisher.answer_replays()
    if rate:
        begin_s = time.monotonic()
        for number, events in enumerate(batches(int(rate * seconds) * batch, batch)):
            while time.monotonic() < begin_s + number / rate:
                time.sleep(0.0002)
            publisher.send(payload(events))
            publisher.answer_replays()
    while sys.stdin.fileno() not in dict(poller.poll(20)):
        publisher.answer_replays()
