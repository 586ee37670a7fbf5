"""Ports are tried before anything is started on them."""

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
