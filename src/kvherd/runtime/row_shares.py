"""A step with many rows, shared among threads by its rows.

Sharing the rows, and not each product, lets every operation use all cores, those too that numpy runs on one; and the
threads meet once a layer instead of at each product, which matters when others use the cores as well. A sequence may
be cut in two: then the later rows attend to the earlier ones, so in each layer a share waits for the keys and values
of the share before it, and for nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Event, Thread
from typing import TypeVar

import numpy as np

from kvherd.runtime.batch import SequenceRows

Result = TypeVar("Result")
LEAST_ROWS = 48  # of a share: products of fewer take longer for each row


def share_rows(sequences: Sequence[SequenceRows], shares: int, *, context_cost: float) -> list[list[SequenceRows]]:
    """Cut a batch into at most so many, of similar cost, in order. A token at p costs 1 + p × `context_cost`."""
    rows = sum(len(sequence.token_ids) for sequence in sequences)
    shares = min(shares, rows // LEAST_ROWS)
    if shares < 2:
        return [list(sequences)]
    positions = np.concatenate(
        [
            np.arange(sequence.first_position, sequence.first_position + len(sequence.token_ids))
            for sequence in sequences
        ]
    )
    costs = np.cumsum(1 + positions * context_cost)
    cuts = np.searchsorted(costs, costs[-1] * np.arange(1, shares) / shares) + 1
    return _cut(sequences, [*cuts.tolist(), rows])


def _cut(sequences: Sequence[SequenceRows], ends: Sequence[int]) -> list[list[SequenceRows]]:
    shares: list[list[SequenceRows]] = [[]]
    row = 0
    for sequence in sequences:
        left = sequence
        while row + len(left.token_ids) > ends[len(shares) - 1]:
            count = ends[len(shares) - 1] - row
            if count:
                shares[-1].append(replace(left, token_ids=left.token_ids[:count], wants_logits=False))
            left = replace(left, token_ids=left.token_ids[count:], first_position=left.first_position + count)
            shares.append([])
            row += count
        shares[-1].append(left)
        row += len(left.token_ids)
    return shares


class Relay:
    """What one share tells the next: the layers whose keys and values it has written."""

    def __init__(self, layers: int, before: "Relay | None") -> None:
        self._written = [Event() for _ in range(layers)]
        self._before = before

    def wrote(self, layer: int) -> None:
        """Say so, and wait until all shares before have said it too."""
        if self._before is not None:
            self._before._await(layer)  # noqa: SLF001 - its own kind
        self._written[layer].set()

    def give_up(self) -> None:
        """Let nobody wait for what will not come."""
        for event in self._written:
            event.set()

    def _await(self, layer: int) -> None:
        self._written[layer].wait()


def run_together(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run each call in a thread, the last in this one; give their results in order. Raises the first one's error.

    Returns when all have ended, also when some failed.
    """
    results: dict[int, Result] = {}
    errors: dict[int, Exception] = {}

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - it crosses to the caller's thread, which raises it there
            errors[index] = error

    # Daemons, as the thread that steps is: a product that hangs must not keep a stopping process alive.
    threads = [Thread(target=run, args=(index,), daemon=True) for index in range(len(calls) - 1)]
    for thread in threads:
        thread.start()
    run(len(calls) - 1)
    for thread in threads:
        thread.join()
    for index in sorted(errors):
        raise errors[index]
    return [results[index] for index in range(len(calls))]
