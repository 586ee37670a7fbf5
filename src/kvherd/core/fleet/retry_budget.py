"""A bound on retries, so that a fleet in trouble is not given twice the load."""


class RetryBudget:
    """Each request earns a part of a retry, each retry costs one; `reserve` are free after a quiet time."""

    def __init__(self, *, ratio: float = 0.2, reserve: float = 10.0) -> None:
        self._ratio = ratio
        self._reserve = reserve
        self._left = reserve

    def earn(self) -> None:
        """A request came."""
        self._left = min(self._reserve, self._left + self._ratio)

    def spend(self) -> bool:
        """Whether one more retry may be made now."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
