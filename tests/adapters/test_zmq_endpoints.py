"""Where each rank publishes, and endpoints that cannot be."""

import pytest

from kvherd.adapters.zmq_endpoints import rank_endpoints, require_apart
from kvherd.core.errors import OptionInvalid
from kvherd.core.ids import Rank


def test_ranks_of_a_tcp_endpoint_are_at_consecutive_ports() -> None:
    found = rank_endpoints("tcp://127.0.0.1:5557", 2, option="--events")
    assert found == {Rank(0): "tcp://127.0.0.1:5557", Rank(1): "tcp://127.0.0.1:5558"}


def test_one_rank_may_be_at_a_unix_socket() -> None:
    assert rank_endpoints("ipc:///run/x.sock", 1, option="--events") == {Rank(0): "ipc:///run/x.sock"}


def test_whoever_listens_may_do_so_on_every_interface() -> None:
    assert rank_endpoints("tcp://*:5557", 1, option="--events", listens=True) == {Rank(0): "tcp://*:5557"}


@pytest.mark.parametrize(
    ("endpoint", "ranks", "problem"),
    [
        ("127.0.0.1:5557", 1, "must be tcp://HOST:PORT or ipc://PATH"),
        ("tcp://127.0.0.1", 1, "must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:port", 1, "must be tcp://HOST:PORT"),
        ("tcp://*:5557", 1, "name the host to connect to, as in tcp://127.0.0.1:5557"),
        ("tcp://127.0.0.1:0", 1, "must be 1 to 65535"),
        ("tcp://127.0.0.1:65535", 2, "ports 65535 to 65536 must be 1 to 65535"),
        ("tcp://a b:5557", 1, "cannot connect to"),
        ("ipc://", 1, "has 1 to 107 bytes"),
        ("ipc:///" + "x" * 107, 1, "has 1 to 107 bytes"),
        ("ipc:///run/x.sock", 2, "has room for one rank"),
    ],
)
def test_an_endpoint_that_cannot_be_is_refused_by_option(endpoint: str, ranks: int, problem: str) -> None:
    with pytest.raises(OptionInvalid, match=r"^--events: ") as caught:
        rank_endpoints(endpoint, ranks, option="--events")
    assert problem in str(caught.value)


def test_events_and_replay_that_overlap_are_refused() -> None:
    events = rank_endpoints("tcp://127.0.0.1:5557", 2, option="--events")
    require_apart(events, rank_endpoints("tcp://127.0.0.1:5559", 2, option="--replay"))
    with pytest.raises(OptionInvalid, match=r"tcp://127\.0\.0\.1:5558 is an endpoint of --events too"):
        require_apart(events, rank_endpoints("tcp://127.0.0.1:5558", 2, option="--replay"))
