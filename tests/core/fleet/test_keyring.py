"""Who may send requests, and how many."""

import pytest

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.keyring import (
    DataKey,
    KeyLimitReached,
    KeyLimits,
    Keyring,
    KeyUnknown,
    beside,
    key_digest,
    same_secret,
)


def ring(**limits: KeyLimits) -> Keyring:
    """One key for each name, whose secret is `secret-NAME`."""
    made = Keyring()
    made.replace(DataKey(name, key_digest(f"secret-{name}"), each) for name, each in limits.items())
    return made


def test_a_ring_without_keys_is_open() -> None:
    assert Keyring().open
    assert not ring(ann=KeyLimits()).open


def test_a_key_is_found_by_its_secret() -> None:
    assert ring(ann=KeyLimits(), bob=KeyLimits()).account(b"Bearer secret-bob").name == "bob"
    assert ring(ann=KeyLimits()).account(b"bearer  secret-ann").name == "ann"


@pytest.mark.parametrize("header", [b"", b"Bearer", b"Bearer secret-bob", b"Basic secret-ann", b"secret-ann"])
def test_anything_else_is_refused_and_never_repeated(header: bytes) -> None:
    with pytest.raises(KeyUnknown) as refused:
        ring(ann=KeyLimits()).account(header)
    assert "secret" not in str(refused.value)
    assert refused.value.given is bool(header)


def test_requests_under_way_are_bounded() -> None:
    account = ring(ann=KeyLimits(in_flight=2)).account(b"Bearer secret-ann")
    account.begin(0.0)
    account.begin(0.0)
    with pytest.raises(KeyLimitReached, match="'ann' may have 2 requests under way at a time"):
        account.begin(0.0)
    account.end()
    account.begin(0.0)
    assert (account.admitted_total, account.refused_total) == (3, 1)


def test_a_rate_is_kept_and_says_when_to_try_again() -> None:
    account = ring(ann=KeyLimits(requests_per_s=0.1)).account(b"Bearer secret-ann")
    account.begin(100.0)
    with pytest.raises(KeyLimitReached) as refused:
        account.begin(103.0)
    assert refused.value.retry_after_s == 7
    account.begin(110.0)
    lively = ring(ann=KeyLimits(requests_per_s=5)).account(b"Bearer secret-ann")
    for _ in range(5):
        lively.begin(0.0)
    with pytest.raises(KeyLimitReached, match="5 requests a second"):
        lively.begin(0.1)
    lively.begin(0.2)


def test_keys_that_are_replaced_keep_what_is_under_way_by_name() -> None:
    keys = ring(ann=KeyLimits(in_flight=1))
    keys.account(b"Bearer secret-ann").begin(0.0)
    keys.replace([DataKey("ann", key_digest("another"), KeyLimits(in_flight=1))])
    with pytest.raises(KeyUnknown):
        keys.account(b"Bearer secret-ann")
    with pytest.raises(KeyLimitReached):
        keys.account(b"Bearer another").begin(0.0)


def test_secrets_are_compared_by_digest() -> None:
    assert same_secret(b"s", key_digest("s"))
    assert not same_secret(b"", key_digest("s"))


def test_a_key_weighs_what_it_was_given_for_as_long_as_it_is_valid() -> None:
    keys = Keyring()
    keys.replace([DataKey("ann", key_digest("a"), weight=3.0), DataKey("bob", key_digest("b"))])
    assert [keys.weight(name) for name in ("ann", "bob", "nobody")] == [3.0, 1.0, 1.0]
    keys.replace(iter([DataKey("bob", key_digest("b"), weight=0.5)]))
    assert [keys.weight(name) for name in ("ann", "bob")] == [1.0, 0.5]
    assert [account.name for account in keys.accounts] == ["bob"]


def test_a_key_of_the_file_is_not_taken_for_the_gateway_s_own() -> None:
    own, other = DataKey("environment", key_digest("secret-one")), DataKey("a", key_digest("secret-two"))
    assert beside(own, [other]) == [own, other]
    assert beside(None, [other]) == [other]
    with pytest.raises(OptionInvalid, match="is how the key of KVHERD_API_KEY is called"):
        beside(own, [other, DataKey("environment", key_digest("secret-three"))])
    with pytest.raises(OptionInvalid, match="'b' is the key of KVHERD_API_KEY, too") as refused:
        beside(own, [DataKey("b", key_digest("secret-one"))])
    assert "secret" not in str(refused.value)
