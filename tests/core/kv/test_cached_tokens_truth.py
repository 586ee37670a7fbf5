"""The events that vLLM 0.32 published predict the cached tokens that it reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvherd.core.ids import Rank, WorkerId
from kvherd.core.kv.cursor import Missing, RankCursor, Repeated, Restarted
from kvherd.core.kv.hashing import PrefixHasher, prefix_chain
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.testing.recordings import Recorded, read_recording
from kvherd.wire.vllm_kv import KvDecoder

FIXTURES = Path(__file__).parents[2] / "fixtures" / "vllm-0.32"
BLOCK, KEY = 32, b"k"
HOLDER = Holder(WorkerId("w"), Rank(0))


class Follower:
    """Applies a recording up to a moment."""

    def __init__(self, messages: list[Recorded]) -> None:
        self.index = PrefixIndex(PrefixHasher(KEY))
        self.index.enrol(HOLDER.worker, model="m")
        self._messages = messages
        self._new_life()
        self.lives = 1

    def _new_life(self) -> None:
        self._cursor, self._decoder = RankCursor(), KvDecoder()
        self.index.clear(HOLDER)

    def until(self, moment_s: float) -> None:
        while self._messages and self._messages[0].received_s < moment_s:
            one = self._messages.pop(0)
            verdict = self._cursor.judge(one.sequence, hash(one.payload))
            assert not isinstance(verdict, Missing | Repeated)
            if isinstance(verdict, Restarted):
                self._new_life()
                self.lives += 1
                self._cursor.judge(one.sequence, hash(one.payload))
            self.index.apply_events(HOLDER, self._decoder.decode(one.payload).events)

    def predict(self, request: dict[str, Any]) -> int:
        prompt = request["prompt_token_ids"]
        chain = prefix_chain(prompt, block_size=BLOCK, model="m", salt=request["salt"], key=KEY)
        held = self.index.match(chain).get(HOLDER, 0)
        return min(held, (len(prompt) - 1) // BLOCK) * BLOCK


def overlapped(request: dict[str, Any], others: list[dict[str, Any]]) -> bool:
    return any(other is not request and other["t0"] < request["t1"] and request["t0"] < other["t1"] for other in others)


@pytest.mark.parametrize(("name", "lives"), [("evict_clear", 1), ("restart", 2)])
def test_sequential_requests_are_predicted_exactly(name: str, lives: int) -> None:
    lines = (FIXTURES / f"{name}_truth.jsonl").read_text().splitlines()
    truth = [json.loads(line) for line in lines]
    follower = Follower(list(read_recording(FIXTURES / f"{name}.bin")))
    wrong, decided, hits, after_reset = [], 0, 0, False
    for request in truth:
        follower.until(request["t0"])
        if request["op"] != "chat":
            after_reset = True
            continue
        first, after_reset = after_reset, False
        if overlapped(request, truth):
            continue
        decided += 1
        hits += request["cached"] > 0
        predicted = follower.predict(request)
        if predicted != request["cached"] and not first:
            wrong.append((request["i"], predicted, request["cached"]))
    assert wrong == []
    assert decided >= 15
    assert hits >= decided / 3
    assert follower.lives == lives
