"""What a rank has done since its process began."""

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 5.0


@dataclass(slots=True)
class Totals:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    requests: int = 0
    aborts: int = 0
    flushes: int = 0
    steps: int = 0
    loaded_tokens: int = 0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def generated(self, tokens: int, now_s: float) -> None:
        self.generated_tokens += tokens
        if tokens:
            self._recent.append((now_s, tokens))
        self._forget(now_s)

    def tokens_per_s(self, now_s: float) -> float:
        """The rate of the last few seconds."""
        self._forget(now_s)
        return sum(tokens for _, tokens in self._recent) / WINDOW_S

    def _forget(self, now_s: float) -> None:
        while self._recent and self._recent[0][0] <= now_s - WINDOW_S:
            self._recent.popleft()
