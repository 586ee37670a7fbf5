"""Listening: at all addresses of a name, on one port, and with nobody else."""

import errno
import socket
from collections.abc import Callable
from typing import Any

import pytest

from kvherd.core.errors import OptionInvalid, PortInUse
from kvherd.services.gateway.listening import listen

HERE = "127.0.0.1"


def named(*hosts: str) -> Callable[..., list[Any]]:
    """A name that has these addresses."""

    def found(_host: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    return found


def listen_at(port: int = 0) -> list[socket.socket]:
    return listen("gateway", port, backlog=8, port_option="--port")


def test_every_address_of_a_name_is_listened_at_on_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", named(HERE, "127.0.0.2"))
    first, second = listen_at()
    with first, second:
        assert first.getsockname()[0] == HERE
        assert second.getsockname() == ("127.0.0.2", first.getsockname()[1])
        for one in (first, second):
            with socket.socket() as caller:
                caller.settimeout(10)
                caller.connect(one.getsockname())


def test_an_address_that_is_not_this_machine_s_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", named("192.0.2.1", HERE))
    (only,) = listen_at()
    with only:
        assert only.getsockname()[0] == HERE


def test_a_port_that_is_taken_at_one_address_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(socket, "getaddrinfo", named(HERE, "127.0.0.2"))
        with pytest.raises(PortInUse, match=f"port {port} is in use; choose another with --port"):
            listen_at(port)


def test_where_any_port_will_do_one_that_is_free_at_all_addresses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real, taken = socket.socket.bind, iter([errno.EADDRINUSE])

    def bind(sock: socket.socket, address: tuple[str, int]) -> None:
        if address[0] == "127.0.0.2" and (problem := next(taken, None)) is not None:
            raise OSError(problem, "taken")
        real(sock, address)

    monkeypatch.setattr(socket, "getaddrinfo", named(HERE, "127.0.0.2"))
    monkeypatch.setattr(socket.socket, "bind", bind)
    first, second = listen_at()
    with first, second:
        assert first.getsockname()[1] == second.getsockname()[1]


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.name.invalid", "a" * 80])
def test_what_is_no_address_of_this_machine_is_refused(host: str) -> None:
    with pytest.raises(OptionInvalid, match="--host"):
        listen(host, 0, backlog=8, port_option="--port")
