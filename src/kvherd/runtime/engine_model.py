"""The one thing a scheduler process needs of the model: load it, then step it."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from kvherd.core.errors import OptionInvalid
from kvherd.core.scheduler.steps import Copy
from kvherd.runtime.architecture import LlamaShape, shape_of
from kvherd.runtime.batch import Choice, ForwardBatch, ModelFacts, SamplingState
from kvherd.runtime.blas_threads import BlasThreads
from kvherd.runtime.gguf_weights import read_head, read_weights, with_rope_divisors
from kvherd.runtime.host_pool import LAYOUT, HostPool
from kvherd.runtime.kv_pool import KvPool
from kvherd.runtime.sampler import sample
from kvherd.runtime.tiny import TINY, random_weights
from kvherd.runtime.transformer import Transformer
from kvherd.runtime.watch import UNWATCHED, Watch
from kvherd.runtime.weight_cache import WeightCache
from kvherd.runtime.weights import Weights, digest


class EngineModel(Protocol):
    """A loaded model and its pool of keys and values. Not safe for two steps at once; blocks for the whole step."""

    @property
    def facts(self) -> ModelFacts: ...

    def step(self, batch: ForwardBatch, states: Sequence[SamplingState], watch: Watch = UNWATCHED) -> list[Choice]:
        """Run the new tokens of every sequence, then choose a token for each that wants logits.

        `states` has one entry for each of those, in the order of the batch; so has the answer.
        `watch` is told what each part took.
        Raises `ValueError` for a token that is not in the vocabulary.
        """
        ...

    def save(self, copies: Sequence[Copy]) -> None:
        """Copy blocks of the pool to host memory, while a step may run that writes into other blocks."""
        ...

    def block_namespace(self) -> str:
        """All that the bytes of a block depend on besides its tokens: the weights, and how a block is laid out.

        Reads every weight, which takes a second or two of a real model.
        """
        ...

    def host_block(self, slot: int) -> memoryview:
        """The bytes of one block in host memory, to read or to write, beside calls that are about other slots."""
        ...

    def load(self, copies: Sequence[Copy]) -> None:
        """Copy blocks back into the pool, between two steps; a `save` of other slots may run beside it."""
        ...


def load_engine_model(
    model: str | Path,
    *,
    pool_blocks: int,
    block_size: int = 16,
    max_context_tokens: int | None = None,
    host_blocks: int = 0,
) -> EngineModel:
    """Load `tiny` or the GGUF at a path; `host_blocks` is how many blocks `save` has slots for.

    `max_context_tokens` can only make a model's context shorter; `tiny`, which learnt nothing, has any that is wanted.

    Raises `ModelMissing`, `ModelUnsupported` and `OptionInvalid`.

    How many cores it computes on is OPENBLAS_NUM_THREADS at the time numpy is first imported.
    """
    if pool_blocks < 1 or block_size < 1:
        raise OptionInvalid("--pool-blocks and --block-size", "both must be at least 1")
    shape, weights = _tiny() if str(model) == "tiny" else _from_file(Path(model))
    if max_context_tokens is not None:
        longest = max_context_tokens if shape is TINY else shape.context_tokens
        shape = replace(shape, context_tokens=min(longest, max_context_tokens))
    return _NumpyModel(shape, weights, KvPool(shape, blocks=pool_blocks, block_size=block_size), host_blocks)


def cache_directory() -> Path:
    """Where converted weights are kept: `$XDG_CACHE_HOME/kvherd`, by default `~/.cache/kvherd`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvherd"


def _tiny() -> tuple[LlamaShape, Weights]:
    return TINY, random_weights(TINY)


def _from_file(path: Path) -> tuple[LlamaShape, Weights]:
    head = read_head(path)
    shape = with_rope_divisors(path, head, shape_of(str(path), head))
    return shape, WeightCache(cache_directory()).load(path, lambda: read_weights(path, head, shape))


class _NumpyModel:
    def __init__(self, shape: LlamaShape, weights: Weights, pool: KvPool, host_blocks: int) -> None:
        self._shape, self._weights = shape, weights
        self._host = HostPool(pool, slots=host_blocks)
        self.save, self.load, self.host_block = self._host.save, self._host.load, self._host.view
        self._transformer = Transformer(shape, weights, pool, threads=BlasThreads())
        self._dice = np.random.default_rng()
        self.facts = ModelFacts(
            vocab_size=shape.vocab_size,
            max_context_tokens=min(shape.context_tokens, pool.blocks * pool.block_size),
            eos_token_ids=shape.eos_token_ids,
            weights_bytes=weights.size_bytes,
            kv_bytes=pool.size_bytes,
            pool_blocks=pool.blocks,
            block_size=pool.block_size,
        )

    def block_namespace(self) -> str:
        shape = replace(self._shape, context_tokens=0, eos_token_ids=())
        return f"{LAYOUT} of {self.facts.block_size} tokens, {shape}, {digest(self._weights)}"

    def step(self, batch: ForwardBatch, states: Sequence[SamplingState], watch: Watch = UNWATCHED) -> list[Choice]:
        logits = self._transformer.forward(batch, watch)
        lap = watch.laps()
        choices = sample(logits, states, self._dice)
        lap("sampling", None, (len(choices),))
        return choices
