"""A key goes into a header as it is, or is refused without being shown."""

import pytest

from kvherd.cli.engine_key import engine_key
from kvherd.core.errors import OptionInvalid


@pytest.mark.parametrize(("given", "key"), [(None, None), ("", None), (" \n", None), ("k-1", "k-1"), ("k\n", "k")])
def test_a_key_loses_what_surrounds_it(given: str | None, key: str | None) -> None:
    assert engine_key(given) == key


@pytest.mark.parametrize("given", ["a b", "a\r\nx: y", "schlüssel"])
def test_what_cannot_stand_in_a_header_is_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(OptionInvalid) as refused:
        engine_key(given)
    assert given not in str(refused.value)
