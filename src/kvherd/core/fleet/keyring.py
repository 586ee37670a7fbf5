"""Which clients may send requests, and how many.

A key is known by its SHA-256 only, so that it stands in no log and in no dump of this process's own objects.
"""

import hmac
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

from kvherd.core.errors import CallerError, OptionInvalid


@dataclass(eq=False)
class KeyUnknown(CallerError):
    """The caller brought no key of this gateway; `given` says whether it brought any. Never holds one."""

    given: bool

    def __str__(self) -> str:
        if self.given:
            return "the key given as `Authorization: Bearer KEY` is not valid here"
        return "give an API key of this gateway as `Authorization: Bearer KEY`"


@dataclass(eq=False)
class KeyLimitReached(CallerError):
    """`limit` is what the key `name` may have; `retry_after_s` when it may try again."""

    name: str
    limit: str
    retry_after_s: int = 1

    def __str__(self) -> str:
        return f"the key {self.name!r} may have {self.limit}; try again later"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may have; None is no limit."""

    in_flight: int | None = None
    requests_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class DataKey:
    name: str
    digest: bytes
    limits: KeyLimits = field(default_factory=KeyLimits)
    weight: float = 1.0
    """Where requests wait, a key has its turns in proportion to it."""


@dataclass(slots=True)
class Account:
    """One key's use. It outlives a change of the keys as long as its name stays.

    The rate is a bucket that holds the requests of one second, at least one.
    """

    name: str
    limits: KeyLimits
    in_flight: int = 0
    refused_total: int = 0
    admitted_total: int = 0
    _left: float = math.inf
    _seen_s: float = 0.0

    def begin(self, now_s: float) -> None:
        """One more request. Raises `KeyLimitReached`."""
        most, rate = self.limits.in_flight, self.limits.requests_per_s
        if most is not None and self.in_flight >= most:
            self.refused_total += 1
            raise KeyLimitReached(self.name, f"{most} request{'s' * (most > 1)} under way at a time")
        if rate is not None:
            self._spend(rate, now_s)
        self.in_flight += 1
        self.admitted_total += 1

    def end(self) -> None:
        self.in_flight -= 1

    def take_back(self) -> None:
        """As if it had not begun: it will begin again."""
        self.in_flight -= 1
        self.admitted_total -= 1
        self._left += 1.0

    def _spend(self, rate: float, now_s: float) -> None:
        room = max(1.0, rate)
        self._left = min(room, self._left + (now_s - self._seen_s) * rate)
        self._seen_s = now_s
        if self._left < 1.0:
            self.refused_total += 1
            raise KeyLimitReached(self.name, f"{rate:g} requests a second", math.ceil((1.0 - self._left) / rate))
        self._left -= 1.0


class Keyring:
    """The data keys. Without any, whoever comes is served."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Account] = {}
        self._weights: dict[str, float] = {}
        self.open = True
        """There is no key."""

    @property
    def accounts(self) -> list[Account]:
        return list(self._by_digest.values())

    def replace(self, keys: Iterable[DataKey]) -> None:
        """These keys and no others are valid from now on; requests under way end as they would."""
        keys = list(keys)
        self._weights = {key.name: key.weight for key in keys}
        known = {account.name: account for account in self._by_digest.values()}
        self._by_digest = {}
        for key in keys:
            account = known.get(key.name) or Account(key.name, key.limits)
            account.limits = key.limits
            self._by_digest[key.digest] = account
        self.open = not self._by_digest

    def weight(self, name: str) -> float:
        """Of a key, by its name; that of one which is valid no longer is 1."""
        return self._weights.get(name, 1.0)

    def account(self, authorization: bytes) -> Account:
        """Whose key this header holds. Raises `KeyUnknown`."""
        scheme, _, token = authorization.partition(b" ")
        digest = sha256(token.strip()).digest()
        found = self._by_digest.get(digest) if scheme.lower() == b"bearer" else None
        if found is None:
            raise KeyUnknown(given=bool(authorization))
        return found


def beside(own: DataKey | None, keys: list[DataKey]) -> list[DataKey]:
    """The keys of a file, and the gateway's own before them. Raises `OptionInvalid` for one taken for its own."""
    if own is None:
        return keys
    for key in keys:
        if key.name == own.name:
            raise OptionInvalid("keys", f"{key.name!r} is how the key of KVHERD_API_KEY is called; choose another name")
        if key.digest == own.digest:
            raise OptionInvalid("keys", f"{key.name!r} is the key of KVHERD_API_KEY, too; give it in one place")
    return [own, *keys]


def key_digest(secret: str) -> bytes:
    return sha256(secret.encode()).digest()


def same_secret(presented: bytes, digest: bytes) -> bool:
    """Compares in a time that tells nothing of where they differ."""
    return hmac.compare_digest(sha256(presented).digest(), digest)
