"""The one thing a scheduler process needs of the model: load it, then step it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvherd.runtime.batch import Choice, ForwardBatch, ModelFacts, SamplingState


class EngineModel(Protocol):
    """A loaded model and its pool of keys and values. Not safe for two steps at once; blocks for the whole step."""

    @property
    def facts(self) -> ModelFacts: ...

    def step(self, batch: ForwardBatch, states: Sequence[SamplingState]) -> list[Choice]:
        """Run the new tokens of every sequence, then choose a token for each that wants logits.

        `states` has one entry for each of those, in the order of the batch; so has the answer.
        """
        ...


def load_engine_model(
    model: str | Path, *, pool_blocks: int, block_size: int = 16, max_context_tokens: int | None = None
) -> EngineModel:
    """Load `tiny` or the GGUF at a path. Raises `ModelMissing` and `ModelUnsupported`.

    How many cores it computes on is OPENBLAS_NUM_THREADS at the time numpy is first imported.
    """
    raise NotImplementedError
