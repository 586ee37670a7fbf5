"""A value of the wrong type is told of in words."""

import msgspec
import pytest

from kvherd.wire.type_words import type_words


class Told(msgspec.Struct):
    text: str | None = None
    count: int = 0
    flag: bool = False
    names: list[str] = []
    share: float = 0.0
    rest: dict[str, str] = {}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("text", 5, "must be a string, not a whole number"),
        ("text", [], "must be a string, not a list"),
        ("count", "x", "must be a whole number, not a string"),
        ("count", 1.5, "must be a whole number, not a fraction"),
        ("count", None, "must be a whole number, not null"),
        ("flag", "yes", "must be true or false, not a string"),
        ("names", {}, "must be a list, not a table"),
        ("share", True, "must be a number, not true or false"),
        ("rest", 5, "must be a table, not a whole number"),
    ],
)
def test_each_type_has_its_words(field: str, value: object, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert({field: value}, Told)
    assert type_words(str(refused.value).partition(" - at ")[0], of_objects="a table") == words


def test_what_is_no_matter_of_types_stays_as_it_was() -> None:
    assert type_words("Invalid datetime") == "Invalid datetime"
