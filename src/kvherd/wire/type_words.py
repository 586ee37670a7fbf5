"""What a library says of a value of the wrong type, in words that need no knowledge of the library."""

import re
from typing import Final

_SAID: Final = re.compile(r"Expected `(?P<wanted>[^`]+)`, got `(?P<got>\w+)`")
_NAMES: Final = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "null": "null",
}


def type_words(said: str, *, of_objects: str = "an object") -> str:
    """`must be a list, not a string`, with `of_objects` for a set of names and values; as it was where it says
    something else.
    """
    names = {**_NAMES, "object": of_objects}
    found = _SAID.fullmatch(said)
    if found is None:
        return said
    wanted = [one for one in found["wanted"].split(" | ") if one != "null"]
    got = names.get(found["got"], found["got"])
    if wanted == ["int"] and found["got"] == "float":
        got = "a fraction"
    return f"must be {' or '.join(names.get(one, one) for one in wanted)}, not {got}"
