"""Link-local addresses are known in every form that leads there."""

import pytest

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.link_local import is_address, is_link_local
from kvherd.core.fleet.shown_url import shown_url
from kvherd.core.fleet.spec import WorkerSpec, events_address, normal_url

LINK_LOCAL = [
    "169.254.169.254",
    "169.254.0.0",
    "169.254.255.255",
    "fe80::1",
    "fe80::1%eth0",
    "febf::1",
    "[fe80::1]",
    "::ffff:169.254.169.254",
    "::ffff:a9fe:a9fe",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
    "::169.254.169.254",
    "fd00:ec2::254",
]


@pytest.mark.parametrize("host", LINK_LOCAL)
def test_it_is_refused_however_it_is_written(host: str) -> None:
    assert is_link_local(host)
    named = f"[{host.strip('[]')}]" if ":" in host else host
    for scheme in ("http", "https", "grpc", "grpcs"):
        with pytest.raises(OptionInvalid, match="is a link-local address, which no worker may have"):
            normal_url(f"{scheme}://{named}:80", "url")
    here = "tcp://127.0.0.1:5557"
    for there in (f"tcp://{named}:5557", f"tcp://127.0.0.1:0;{named}:5557"):
        for spec in (WorkerSpec("http://e:1", there), WorkerSpec("http://e:1", here, there)):
            with pytest.raises(OptionInvalid, match="is a link-local address, which no worker may have"):
                events_address(spec)
    assert events_address(WorkerSpec("http://e:1", here, "ipc:///run/replay.sock")) == here


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.0.0.7", "169.253.255.255", "169.255.0.0", "::1", "fd00::1", "fec0::1", "::ffff:10.0.0.7"]
)
def test_others_are_not(host: str) -> None:
    assert is_address(host)
    assert not is_link_local(host)


def test_names_are_none_until_they_are_looked_up() -> None:
    for name in ("metadata.test", "2852039166", "0xa9fea9fe", ""):
        assert not is_address(name)
        assert not is_link_local(name)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://a:1/p", "'http://a:1/p'"),
        ("http://user:secret@a:1", "'http://…@a:1'"),
        ("http://user:sec@ret@a:1/x?key=secret#secret", "'http://…@a:1/x?…'"),
        ("grpc://secret@[::1]:1?a@b", "'grpc://…@[::1]:1?…'"),
        ("http://[secret@", "'http://…@'"),
    ],
)
def test_a_url_is_repeated_without_what_may_be_secret_in_it(url: str, shown: str) -> None:
    assert shown_url(url) == shown
