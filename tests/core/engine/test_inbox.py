"""What waits for a reader is one delta, whatever came meanwhile."""

from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.engine.generation import Finish, FinishReason, TokenDelta, TokenLogprob
from kvherd.core.engine.inbox import Inbox


def _delta(tokens: list[int], said: int, finish: Finish | None = None) -> TokenDelta:
    return TokenDelta(tuple(tokens), 7, said, 3, tuple(TokenLogprob(token, -1.0) for token in tokens), finish)


def test_nothing_waits_before_anything_came() -> None:
    inbox = Inbox(7)
    assert inbox.take() is None
    assert (inbox.latest.prompt_tokens, inbox.latest.completion_tokens) == (7, 0)


@given(steps=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=12), reads=st.sets(st.integers(0, 12)))
def test_whenever_it_is_read_all_tokens_come_once_and_in_order(steps: list[list[int]], reads: set[int]) -> None:
    inbox, read, said = Inbox(7), [], 0
    for number, tokens in enumerate(steps):
        said += len(tokens)
        inbox.put(_delta(tokens, said))
        if number in reads:
            read.append(inbox.take())
    inbox.put(_delta([], said, Finish(FinishReason.LENGTH)))
    read.append(inbox.take())
    assert inbox.take() is None
    deltas = [delta for delta in read if delta is not None]
    tokens = [token for step in steps for token in step]
    assert [token for delta in deltas for token in delta.token_ids] == tokens
    assert [logprob.token_id for delta in deltas for logprob in delta.logprobs] == tokens
    assert deltas[-1].completion_tokens == len(tokens)
    assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_nothing_comes_after_the_end() -> None:
    inbox = Inbox(7)
    inbox.put(_delta([], 0, Finish(FinishReason.ABORT, message="enough")))
    inbox.put(_delta([1], 1))
    last = inbox.take()
    assert last is not None
    assert last.finish == Finish(FinishReason.ABORT, message="enough")
    assert inbox.take() is None
    assert inbox.finished
