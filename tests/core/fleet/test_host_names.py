"""What a server may be called where nobody needs a key."""

import pytest

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.host_names import HostNames, HostUnknown, PageElsewhere

LOCAL = HostNames("127.0.0.1")


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost",
        "LocalHost:8080",
        "localhost.",
        "127.0.0.1:8080",
        "[::1]:8080",
        "::1",
        "10.0.0.7",
        "[fe80::1%25eth0]:1",
    ],
)
def test_an_address_and_this_machine_s_own_name_are_always_known(host: str) -> None:
    LOCAL.check(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.test",
        "evil.test:8080",
        "localhost.evil.test",
        "127.0.0.1.evil.test",
        "evil.test:80:80",
        "[::1].evil.test",
        "[::1]:8080.evil.test",
        "127.0.0.1:x",
        "127.0.0.1:8080@evil.test",
        "0x7f000001",
        "2130706433",
        "a" * 500,
    ],
)
def test_any_other_name_is_refused_with_what_helps(host: str) -> None:
    with pytest.raises(HostUnknown, match="ask it by its address, or have its operator name it so") as refused:
        LOCAL.check(host)
    assert len(str(refused.value)) < 300


def test_names_that_were_told_are_known_and_may_change() -> None:
    names = HostNames("0.0.0.0", ["Gateway.Internal."])
    names.check("gateway.internal:443")
    names.replace(["other"])
    names.check("OTHER")
    with pytest.raises(HostUnknown):
        names.check("gateway.internal")


def test_a_name_that_it_listens_at_is_its_own() -> None:
    HostNames("herd.internal").check("herd.internal:8080")


@pytest.mark.parametrize(
    ("listens", "names", "closed"),
    [
        ("127.0.0.1", (), True),
        ("::1", (), True),
        ("localhost", (), True),
        ("0.0.0.0", (), False),
        ("10.0.0.7", (), False),
        ("0.0.0.0", ("a.test",), True),
    ],
)
def test_nobody_has_reason_to_use_another_name_on_this_machine_or_where_names_were_told(
    listens: str, names: tuple[str, ...], closed: bool
) -> None:
    assert HostNames(listens, names).closed is closed


@pytest.mark.parametrize("name", ["", "a:80", "http://a", "a b", "*.a", "a/b", "é"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(OptionInvalid, match="is not a host's name such as"):
        HostNames("127.0.0.1", [name])


@pytest.mark.parametrize(
    ("origin", "site"),
    [
        (None, None),
        (None, "same-origin"),
        (None, "none"),
        ("http://localhost:3000", "same-site"),
        ("http://127.0.0.1:3000", None),
        ("http://[::1]:3000", None),
        ("https://ui.test", None),
        ("http://10.0.0.7:51002", None),
    ],
)
def test_programs_and_pages_of_this_machine_may_ask(origin: str | None, site: str | None) -> None:
    HostNames("0.0.0.0", ["ui.test"]).check_page(host="10.0.0.7:51002", origin=origin, site=site)


@pytest.mark.parametrize(
    ("origin", "site"),
    [("http://evil.test", None), ("null", None), (None, "cross-site"), ("http://localhost:3000", "cross-site")],
)
def test_pages_of_other_sites_may_not(origin: str | None, site: str | None) -> None:
    with pytest.raises(PageElsewhere):
        LOCAL.check_page(host="127.0.0.1:51002", origin=origin, site=site)
