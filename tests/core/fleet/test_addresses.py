"""What a resolver answers, and what is made of it."""

from kvherd.core.fleet.addresses import DOUBTS, HostAddresses


def test_addresses_are_taken_up_at_once() -> None:
    host = HostAddresses()
    assert host.answered(["a"]) == ("a",)
    assert host.answered(["a", "b"]) == ("a", "b")


def test_an_address_is_given_up_after_several_answers_without_it() -> None:
    host = HostAddresses()
    host.answered(["a", "b"])
    for _ in range(DOUBTS - 1):
        assert host.answered(["b"]) == ("a", "b")
    assert host.answered(["b"]) == ("b",)


def test_an_address_that_is_told_now_and_then_stays() -> None:
    host = HostAddresses()
    host.answered(["a", "b"])
    for _ in range(10):
        assert host.answered(["b"]) == ("a", "b")
        assert set(host.answered(["a"])) == {"a", "b"}


def test_no_answer_changes_nothing() -> None:
    host = HostAddresses()
    host.answered(["a"])
    for _ in range(10):
        assert host.answered([]) == ("a",)
