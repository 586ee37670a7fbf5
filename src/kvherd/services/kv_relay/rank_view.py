"""How one rank of a relayed engine stands, for those who watch."""

from dataclasses import dataclass

from kvherd.core.ids import Rank


@dataclass(frozen=True, slots=True)
class RankView:
    """`batches`: told in this epoch. `engine_sequence`: the engine's own number of the last, -1 if it sent none.

    `doubt`: why what is told may not be all or not be true, empty if nothing speaks against it. `unknown_before`:
    batches of the engine's life that nobody saw. `gaps`, `bad_frames`: since the start.
    """

    rank: Rank
    batches: int
    engine_sequence: int
    blocks: int
    unknown_before: int
    doubt: str
    lag_s: float | None
    worst_lag_s: float | None
    gaps: int
    bad_frames: int
