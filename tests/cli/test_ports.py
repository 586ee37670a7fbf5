"""Ports are tried before anything is started on them."""

import errno
import socket

import pytest

from kvherd.cli.ports import require_free
from kvherd.core.errors import OptionInvalid, PortInUse

pytestmark = pytest.mark.net


def test_a_free_port_is_no_news(unused_port: int) -> None:
    require_free("127.0.0.1", [unused_port], option="--port")


def test_a_port_in_use_is_named_with_the_option_that_chooses_another() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortInUse) as refused:
            require_free("127.0.0.1", [port], option="--gateway-port")
    assert str(refused.value) == f"port {port} is in use; choose another with --gateway-port"


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(OptionInvalid, match="is no port"):
        require_free("127.0.0.1", [port], option="--port")


def test_an_address_of_elsewhere_is_not_taken_for_a_port_in_use() -> None:
    with pytest.raises(OptionInvalid) as refused:
        require_free("192.0.2.1", [12345], option="--port")
    assert str(refused.value) == (
        "--host: '192.0.2.1' is no address of this machine (cannot assign requested address); "
        "127.0.0.1 is this machine alone, 0.0.0.0 all its addresses"
    )


def test_a_name_that_nobody_knows_is_refused_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OptionInvalid, match=r"--host: 'nowhere' is no address .* \(name or service not known\)"):
        require_free("nowhere", [12345], option="--port")


def test_an_empty_address_is_not_every_address() -> None:
    with pytest.raises(OptionInvalid, match=r"--listen: is empty; 127\.0\.0\.1 is this machine alone"):
        require_free("", [12345], option="--listen", host_option="--listen")


def test_a_port_for_the_system_s_own_is_refused_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbids(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "socket", Forbids)
    with pytest.raises(OptionInvalid, match=r"--port: this user may not listen on port 80; choose one from 1024 on"):
        require_free("127.0.0.1", [80], option="--port")
