"""A foreign subscriber of KV events in a process of its own, that can be stopped.

    python -m kvherd.testing.subscriber_process HOST:PORT STATE

follows for ever with the field's stubs alone, from zero after every end, and writes what it knows to STATE, as JSON.
"""

import json
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from kvherd.testing.processes import OwnedProcess

_WRITE_S = 0.05
_AGAIN_S = 0.1


@dataclass
class Seen:
    """`ends`: the statuses of the streams that ended. `snapshots`: how often all was told from the beginning."""

    held: set[int] = field(default_factory=set)
    ends: list[str] = field(default_factory=list)
    snapshots: int = 0
    batches: int = 0

    def take(self, message: common_pb2.KvEventBatch) -> None:
        self.batches += 1
        if message.HasField("snapshot") and message.snapshot.index == 0:
            self.snapshots += 1
            self.held.clear()
        for event in message.events:
            match event.WhichOneof("data"):
                case "stored":
                    self.held |= {block.block_hash for block in event.stored.blocks}
                case "removed":
                    self.held -= set(event.removed.block_hashes)
                case _:
                    self.held.clear()


class SubscriberProcess(OwnedProcess):
    """A context manager, as every process of a test."""

    def __init__(self, address: str, state: Path) -> None:
        self._state = state
        super().__init__([sys.executable, "-m", "kvherd.testing.subscriber_process", address, str(state)])

    @property
    def seen(self) -> Seen:
        """As of a moment ago."""
        if not self._state.exists():
            return Seen()
        told: dict[str, Any] = json.loads(self._state.read_text())
        return Seen(**{**told, "held": set(told["held"])})


def follow(address: str, seen: Seen) -> NoReturn:
    with grpc.insecure_channel(address) as channel:
        stub = VllmEngineStub(channel)
        while True:
            try:
                for message in stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), wait_for_ready=True):
                    seen.take(message)
            except grpc.RpcError as error:
                seen.ends.append(error.code().name)
            time.sleep(_AGAIN_S)


def main(address: str, state: str) -> NoReturn:
    seen, place = Seen(), Path(state)
    threading.Thread(target=follow, args=(address, seen), daemon=True).start()
    while True:
        told = json.dumps({**asdict(seen), "held": sorted(seen.held.copy())})
        new = place.with_suffix(".new")
        new.write_text(told)
        new.replace(place)
        time.sleep(_WRITE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
