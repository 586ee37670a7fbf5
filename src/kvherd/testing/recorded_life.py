"""A recording applied to an index up to any moment, as a follower would have."""

from collections.abc import Sequence

from kvherd.core.ids import Rank, WorkerId
from kvherd.core.kv.cursor import Missing, RankCursor, Repeated, Restarted
from kvherd.core.kv.hashing import PrefixHasher, prefix_chain
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.testing.recordings import Recorded
from kvherd.wire.vllm_kv import KvDecoder

_HOLDER = Holder(WorkerId("w"), Rank(0))
_MODEL, _KEY = "m", b"k"


class RecordedLife:
    """What one rank's recorded messages say it holds; `lives` counts its publishers. They must have no gap."""

    def __init__(self, messages: Sequence[Recorded]) -> None:
        self.index = PrefixIndex(PrefixHasher(_KEY))
        self.index.enrol(_HOLDER.worker, model=_MODEL)
        self.lives = 0
        self._messages = list(messages)
        self._begin_life()

    def until(self, moment_s: float) -> None:
        while self._messages and self._messages[0].received_s < moment_s:
            one = self._messages.pop(0)
            verdict = self._cursor.judge(one.sequence, hash(one.payload))
            assert not isinstance(verdict, Missing | Repeated)
            if isinstance(verdict, Restarted):
                self._begin_life()
                self._cursor.judge(one.sequence, hash(one.payload))
            self.index.apply_events(_HOLDER, self._decoder.decode(one.payload).events)

    def predict(self, prompt: Sequence[int], *, block_size: int, salt: str | None = None) -> int:
        """The tokens of `prompt` that an engine would find in its cache, which computes the last one always."""
        chain = prefix_chain(prompt, block_size=block_size, model=_MODEL, salt=salt, key=_KEY)
        held = self.index.match(chain).get(_HOLDER, 0)
        return min(held, (len(prompt) - 1) // block_size) * block_size

    def _begin_life(self) -> None:
        self._cursor, self._decoder = RankCursor(), KvDecoder()
        self.index.clear(_HOLDER)
        self.lives += 1
