"""The replay of every rank of an engine is asked, and the one that lacks something is named."""

from kvherd.core.ids import Rank
from kvherd.core.kv.frames import Frame, Replayed
from kvherd.services.doctor.findings import Verdict
from kvherd.services.doctor.replay import judged

SILENT = Replayed((), ended=False)
EMPTY = Replayed((), ended=True)
WHOLE = Replayed((Frame(0, b""),), ended=True)
SHORT = Replayed((Frame(7, b""),), ended=True)


def test_ranks_that_all_answer_are_fine_also_where_one_has_nothing_to_tell() -> None:
    found = judged({Rank(0): WHOLE, Rank(1): EMPTY})
    assert (found.verdict, found.seen) == (Verdict.OK, "all 2 ranks answer, back to the first batch of this life")


def test_a_rank_that_does_not_answer_is_named() -> None:
    found = judged({Rank(0): WHOLE, Rank(1): SILENT, Rank(2): SILENT})
    assert (found.verdict, found.seen) == (Verdict.PROBLEM, "ranks 1, 2: nothing answers there within 2 s")


def test_a_rank_whose_replay_is_short_is_named_with_how_far_it_reaches() -> None:
    found = judged({Rank(0): WHOLE, Rank(1): SHORT})
    assert (found.verdict, found.seen) == (Verdict.WARNING, "rank 1: it reaches back to batch 7 only")


def test_the_worst_rank_decides() -> None:
    assert judged({Rank(0): SILENT, Rank(1): SHORT}).verdict is Verdict.PROBLEM
