"""Models from files: what can be read, and how what cannot is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from kvherd.core.engine.generation import Sampling
from kvherd.core.errors import ModelMissing, ModelUnsupported
from kvherd.runtime.batch import ForwardBatch, SamplingState, SequenceRows
from kvherd.runtime.engine_model import load_engine_model
from kvherd.testing.gguf_files import write_llama
from kvherd.testing.plain_llama import PlainLlama, PlainShape, random_tensors

SHAPE = PlainShape(40, 64, 96, layers=2, heads=4, kv_heads=2, head_size=16)
GREEDY = Sampling(temperature=0.0, logprobs=3)


@pytest.mark.parametrize(
    "kind",
    [
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q8_0,
    ],
)
@pytest.mark.usefixtures("cache")
def test_a_quantized_file_runs_as_what_its_numbers_stand_for(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    path = tmp_path / "model.gguf"
    tensors = write_llama(path, SHAPE, random_tensors(SHAPE), matrices=kind)
    model = load_engine_model(path, pool_blocks=4)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    (choice,) = model.step(ForwardBatch([SequenceRows(tokens, 0, [2])]), [SamplingState(GREEDY, len(tokens))])
    logits = PlainLlama(SHAPE, tensors).logits(tokens)[-1].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum())
    assert choice.token_id == logits.argmax()
    assert choice.logprob is not None
    assert choice.logprob.logprob == pytest.approx(logprobs.max(), abs=1e-4)
    assert [token for token, _ in choice.logprob.top] == np.argsort(-logprobs)[:3].tolist()


@pytest.mark.usefixtures("cache")
def test_the_facts_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, SHAPE, random_tensors(SHAPE), context_tokens=128, entries={"tokenizer.ggml.eot_token_id": 7})
    facts = load_engine_model(path, pool_blocks=100, block_size=16).facts
    assert (facts.vocab_size, facts.max_context_tokens, facts.eos_token_ids) == (40, 128, (2, 7))
    assert facts.kv_bytes == 2 * SHAPE.layers * 100 * 16 * SHAPE.kv_heads * SHAPE.head_size * 4
    assert load_engine_model(path, pool_blocks=100, max_context_tokens=50).facts.max_context_tokens == 50
    assert load_engine_model(path, pool_blocks=2, block_size=16).facts.max_context_tokens == 32


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "yarn"}, "scales its positions (yarn)"),
        ({"llama.rope.dimension_count": 8}, "rotates only a part"),
        ({"llama.attention.head_count_kv": 3}, "4 heads cannot share 3"),
        ({"llama.attention.value_length": 8}, "keys and values differ"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two'"),
        ({"llama.block_count": 3}, "no tensor blk.2.attn_norm.weight"),
        ({"llama.feed_forward_length": 95}, "blk.0.ffn_gate.weight is (96, 64), where (95, 64) should be"),
    ],
)
def test_a_model_that_would_answer_nonsense_is_refused(
    tmp_path: Path, entries: dict[str, int | str], said: str
) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, SHAPE, random_tensors(SHAPE), entries=entries)
    with pytest.raises(ModelUnsupported) as refused:
        load_engine_model(path, pool_blocks=4)
    assert said in str(refused.value)


@pytest.mark.usefixtures("cache")
def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, SHAPE, random_tensors(SHAPE), architecture="mamba")
    with pytest.raises(ModelUnsupported, match="its architecture is 'mamba', and only 'llama' runs here"):
        load_engine_model(path, pool_blocks=4)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("own", "factor"),
    [((1.0, 1.0, 1.5, 2.5, 4.0, 8.0, 8.0, 8.0), None), (None, 4.0), ((1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 8.0, 8.0), 2.0)],
)
def test_scaled_positions_turn_as_slowly_as_the_file_says(
    tmp_path: Path, own: tuple[float, ...] | None, factor: float | None
) -> None:
    path = tmp_path / "model.gguf"
    entries = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": factor} if factor else {}
    extra = {"rope_freqs.weight": np.array(own, dtype=np.float32)} if own else {}
    tensors = write_llama(path, SHAPE, random_tensors(SHAPE), entries=entries, extra=extra)  # type: ignore[arg-type]
    divisors = tuple(each * (factor or 1.0) for each in own or (1.0,) * 8)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6] * 5
    model = load_engine_model(path, pool_blocks=4)
    rows = SequenceRows(tokens, 0, [2, 0, 3])
    (choice,) = model.step(ForwardBatch([rows]), [SamplingState(GREEDY, len(tokens))])
    scaled = PlainLlama(replace(SHAPE, rope_divisors=divisors), tensors).logits(tokens)[-1].astype(np.float64)
    plain = PlainLlama(SHAPE, tensors).logits(tokens)[-1].astype(np.float64)
    assert choice.logprob is not None
    assert choice.logprob.logprob == pytest.approx((scaled - np.log(np.exp(scaled).sum())).max(), abs=1e-4)
    assert np.abs(scaled - plain).max() > 0.01


@pytest.mark.usefixtures("cache")
def test_positions_that_would_not_turn_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, SHAPE, random_tensors(SHAPE), extra={"rope_freqs.weight": np.zeros(8, dtype=np.float32)})
    with pytest.raises(ModelUnsupported, match="rope_freqs are not all above 0"):
        load_engine_model(path, pool_blocks=4)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("kept", [0, 3, 20, 400, 0.5, 0.99])
def test_a_file_cut_short_is_refused_wherever_it_was_cut(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, SHAPE, random_tensors(SHAPE))
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(len(whole) * kept)])
    with pytest.raises(ModelMissing) as missing:
        load_engine_model(path, pool_blocks=4)
    assert str(missing.value).startswith(f"no model at {path}: the file ")


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="No such file"):
        load_engine_model(tmp_path / "none.gguf", pool_blocks=4)
