"""Reads the fields of a JSON object one by one, each refusal a sentence with the field's path.

`null` is as good as absent: clients send it for what they leave open.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

from kvherd.core.errors import FieldInvalid
from kvherd.wire.openai.body import json_name

T = TypeVar("T")


class Fields:
    """The fields of one object; `path` is where it is in the body ("" for the body itself)."""

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def get(self, name: str) -> object:
        return self._values.get(name)

    def invalid(self, name: str, problem: str) -> FieldInvalid:
        return FieldInvalid(self.at(name), problem)

    def text(self, name: str, default: T) -> str | T:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.invalid(name, f"must be a string, not {json_name(value)}")
        return value

    def required_text(self, name: str, hint: str) -> str:
        value = self.text(name, None)
        if not value:
            raise self.invalid(name, hint)
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(name, f"must be true or false, not {json_name(value)}")
        return value

    def integer(self, name: str, default: T, *, low: int, high: int) -> int | T:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            shown = value if isinstance(value, float) else json_name(value)
            raise self.invalid(name, f"must be a whole number, not {shown}")
        if not low <= value <= high:
            raise self.invalid(name, f"must be {_range(str(low), str(high))}, not {value}")
        return value

    def number(self, name: str, default: float, *, low: float = -math.inf, high: float = math.inf) -> float:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(name, f"must be a number, not {json_name(value)}")
        if not low <= value <= high:
            raise self.invalid(name, f"must be {_range(format(low, 'g'), format(high, 'g'))}, not {value}")
        return float(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.invalid(name, f"must be an object, not {json_name(value)}")
        return value

    def sequence(self, name: str, item: Callable[[str, object], T], *, most: int) -> tuple[T, ...]:
        """Each item read by `item(path, value)`."""
        return tuple(item(f"{self.at(name)}[{index}]", each) for index, each in enumerate(self._list(name, most)))

    def tokens(self, name: str, *, most: int) -> tuple[int, ...]:
        return token_items(self.at(name), self._list(name, most))

    def _list(self, name: str, most: int) -> list[Any]:
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.invalid(name, f"must be a list, not {json_name(value)}")
        if len(value) > most:
            raise self.invalid(name, f"must have at most {most} entries, not {len(value)}")
        return value


def text_item(path: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise FieldInvalid(path, "must be a string with at least one character")
    return value


def token_item(path: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise FieldInvalid(path, "must be a token id: a whole number, 0 or more")
    return value


def token_items(path: str, values: list[Any]) -> tuple[int, ...]:
    """All of them in a few steps: there may be millions, and everybody waits for them."""
    if values and set(map(type, values)) == {int} and min(values) >= 0 and max(values) < 2**31:
        return tuple(values)
    return tuple(token_item(f"{path}[{index}]", each) for index, each in enumerate(values))


def object_item(path: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldInvalid(path, f"must be an object, not {json_name(value)}")
    return value


def _range(low: str, high: str) -> str:
    """As numbers are written; a bound that was a whole number is told as one."""
    return f"{low} or more" if high == "inf" else f"between {low} and {high}"
