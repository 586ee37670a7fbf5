"""What a request's headers say to the gateway itself."""

from collections.abc import Sequence
from typing import Final

from kvherd.core.ids import Rank
from kvherd.services.gateway.turns.turn import Turn
from kvherd.services.gateway.waiting.patience import TIMEOUT, seconds_told
from kvherd.wire.http_heads import Header, KnownHeaders, first
from kvherd.wire.openai.routing import RANK_HEADER

EXPLAIN: Final = b"x-kvherd-explain"


class _Unheeded:
    """Noted of a block of headers that says nothing to the gateway itself."""


_UNHEEDED: Final = _Unheeded()
_HEEDED: Final = (EXPLAIN, TIMEOUT, RANK_HEADER)


def heed(turn: Turn, said: Sequence[Header]) -> None:
    """What the headers say to the gateway itself. Raises `FieldInvalid`."""
    asked = turn.asked
    rank = asked.routed_dp_rank if asked.data_parallel_rank is None else asked.data_parallel_rank
    if type(said) is KnownHeaders and said.written is not None:  # what is its own are a length, a name and a trace
        block = said.block
        if block.noted is None and all(block.first(name) is None for name in _HEEDED):
            block.noted = _UNHEEDED
        if block.noted is _UNHEEDED:
            if rank is not None:
                turn.wanted_rank = Rank(rank)
            return
    turn.explain = first(said, EXPLAIN) == b"1"
    within = first(said, TIMEOUT)
    if within is not None:
        within_s = seconds_told(within)
        turn.ends = turn.began_s + within_s, within_s
    named = first(said, RANK_HEADER) or b""
    if named.isdigit() and len(named) < 10:
        rank = int(named)
    if rank is not None:
        turn.wanted_rank = Rank(rank)
