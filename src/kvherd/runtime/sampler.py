"""Choose the next token of each sequence from its logits.

Order of effect, as in vLLM: logprobs are read from the plain logits; then logit bias, forbidden tokens, repetition,
frequency and presence penalties; then temperature, min-p, top-k and top-p, each on what the one before left; then the
dice. Greedy skips all from the temperature on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvherd.core.engine.generation import TokenLogprob
from kvherd.runtime.batch import Choice, SamplingState
from kvherd.runtime.weights import Floats

GREEDY_BELOW = 1e-5  # a lower temperature divides logits beyond float32


def sample(logits: Floats, states: Sequence[SamplingState], dice: np.random.Generator) -> list[Choice]:
    """Choose a token for each row of `logits`, which may be overwritten. `dice` is for requests without a seed.

    A request with a seed gets the same token at the same position for the same logits, whatever else is in the batch.
    """
    plain = [_plain(row, state.sampling.logprobs) for row, state in zip(logits, states, strict=True)]
    for row, state in zip(logits, states, strict=True):
        _adjust(row, state)
    best: list[int] = logits.argmax(axis=-1).tolist()
    chosen = [
        token if state.sampling.temperature < GREEDY_BELOW else _draw(row, state, dice)
        for token, row, state in zip(best, logits, states, strict=True)
    ]
    return [Choice(token, each.of(token) if each else None) for token, each in zip(chosen, plain, strict=True)]


@dataclass(frozen=True, slots=True)
class _Plain:
    """Logprobs of one row as the model gave it."""

    logprobs: NDArray[np.float64]
    top: tuple[tuple[int, float], ...]

    def of(self, token: int) -> TokenLogprob:
        return TokenLogprob(token, float(self.logprobs[token]), self.top)


def _plain(row: Floats, alternatives: int | None) -> _Plain | None:
    if alternatives is None:
        return None
    logprobs = row.astype(np.float64)
    logprobs -= logprobs.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    count = min(alternatives, len(row))
    top: NDArray[np.intp] = np.argpartition(-logprobs, count - 1)[:count] if count else np.empty(0, dtype=np.intp)
    top = top[np.lexsort((top, -logprobs[top]))]
    return _Plain(logprobs, tuple((int(token), float(logprobs[token])) for token in top))


def _adjust(row: Floats, state: SamplingState) -> None:
    """Bias, ban and penalise in place. Tokens outside the vocabulary have no effect."""
    sampling = state.sampling
    for token, bias in sampling.logit_bias:
        if 0 <= token < len(row):
            row[token] += np.float32(bias)
    if state.forbidden_token_ids:
        row[_known(state.forbidden_token_ids, row)] = -np.inf
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(_known([*state.prompt_token_ids, *state.output_token_ids], row))
        logits = row[seen]
        penalty = np.float32(sampling.repetition_penalty)
        row[seen] = np.where(logits > 0, logits / penalty, logits * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        tokens, counts = np.unique(_known(state.output_token_ids, row), return_counts=True)
        row[tokens] -= (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(np.float32)


def _known(tokens: Sequence[int], row: Floats) -> NDArray[np.intp]:
    ids = np.asarray(tokens, dtype=np.intp)
    known: NDArray[np.intp] = ids[(ids >= 0) & (ids < len(row))]
    return known


def _draw(row: Floats, state: SamplingState, dice: np.random.Generator) -> int:
    """Draw one token by its probability.

    The cumulative sum runs in the order of the vocabulary: sorted by probability, two near ties that swap places
    (rounding differs with the batch) would change the draw for most values of the dice.
    """
    sampling = state.sampling
    weights = row.astype(np.float64)
    weights -= weights.max()
    np.exp(weights / sampling.temperature, out=weights)
    if sampling.min_p > 0.0:
        weights[weights < sampling.min_p] = 0.0  # the largest weight is 1
    if 0 < sampling.top_k < len(weights):
        kept = np.argpartition(weights, len(weights) - sampling.top_k)[len(weights) - sampling.top_k :]
        _keep(weights, kept)
    if sampling.top_p < 1.0:
        _keep(weights, _nucleus(weights, sampling.top_p))
    if sampling.seed is not None:
        dice = np.random.default_rng((sampling.seed % (1 << 64), state.position))
    cumulated = weights.cumsum()
    token = int(cumulated.searchsorted(dice.random() * cumulated[-1], side="right"))
    return min(token, int(weights.nonzero()[0][-1]))  # rounding may put the dice at the very end


def _nucleus(weights: NDArray[np.float64], share: float) -> NDArray[np.intp]:
    """The fewest most likely tokens that together have at least `share` of all probability; at least one."""
    candidates = weights.nonzero()[0]
    ordered = candidates[np.argsort(-weights[candidates], kind="stable")]
    cumulated = weights[ordered].cumsum()
    count = int(cumulated.searchsorted(share * cumulated[-1])) + 1
    kept: NDArray[np.intp] = ordered[:count]
    return kept


def _keep(weights: NDArray[np.float64], kept: NDArray[np.intp]) -> None:
    saved = weights[kept]
    weights[:] = 0.0
    weights[kept] = saved
