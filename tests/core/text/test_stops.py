"""The answer ends before the first complete stop string, however the text comes in pieces."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from kvherd.core.text.stops import Passed, StopMatcher

letters = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def run(stops: list[str], pieces: list[str]) -> Passed:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        passed = matcher.feed(piece)
        shown += passed.text
        if passed.matched is not None:
            return Passed(shown, passed.matched)
    return Passed(shown + matcher.finish())


def by_brute_force(stops: list[str], text: str) -> Passed:
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return Passed(text[: end - len(longest)], longest)
    return Passed(text)


@given(stop_lists, letters, st.lists(st.integers(0, 30), max_size=6))
@example(["abb", "ba"], "abab", [2])
def test_the_answer_is_the_same_however_the_text_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    assert run(stops, pieces) == by_brute_force(stops, text)


@given(stop_lists, letters)
def test_only_what_may_become_a_stop_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end in range(1, len(text) + 1):
        passed = matcher.feed(text[end - 1])
        shown += passed.text
        if passed.matched is not None:
            return
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_across_two_pieces_is_found() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.feed("done<") == Passed("done")
    assert matcher.feed("/s> more") == Passed("", "</s>")


def test_what_did_not_become_a_stop_is_shown_at_the_end() -> None:
    matcher = StopMatcher(["</s>"])
    matcher.feed("a </")
    assert matcher.finish() == "</"
