"""What comes out of a client's bytes, however they are cut."""

import pytest

from kvherd.core.errors import BodyTooLarge, FrameInvalid, HeadTooLarge, KvherdError, Unsupported
from kvherd.services.gateway.relay.edge import DataRequest, RelayLimits, is_data
from kvherd.services.gateway.relay.incoming import Incoming, Refusal, Stage
from kvherd.services.gateway.relay.requests import RequestParser

GET = b"GET /health?x=1 HTTP/1.1\r\nHost: here\r\nX-Request-Id: r1\r\nTraceparent: t1\r\n\r\n"
POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nX-Request-Id: r2\r\nTraceparent: t2\r\n"
    b"Content-Type: application/json\r\nX-Empty:\r\nContent-Length: 9\r\n\r\n"
    b'{"a": 12}'
)
CHUNKED = (
    b"POST /generate HTTP/1.1\r\nHost: here\r\nX-Request-Id: r3\r\nTraceparent: t3\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
    b'5;ext=1\r\n{"a":\r\n4\r\n 12}\r\n0\r\nHost: evil\r\n\r\n'
)


def parse(*pieces: bytes, limits: RelayLimits | None = None) -> RequestParser:
    parser = RequestParser(limits or RelayLimits(), "127.0.0.1:5")
    for piece in pieces:
        parser.feed(piece)
    return parser


def requests(parser: RequestParser) -> list[DataRequest]:
    return [item.request for item in parser.ready if isinstance(item, Incoming)]


def told(parser: RequestParser) -> list[tuple[object, ...]]:
    """All that is said of each request."""
    found = requests(parser)
    return [(one.method, one.target, list(one.headers), one.body, one.peer, one.request, one.key) for one in found]


def error(parser: RequestParser) -> KvherdError:
    last = parser.ready[-1]
    assert isinstance(last, Refusal)
    assert parser.ended
    return last.error


@pytest.mark.parametrize("whole", [GET, POST, CHUNKED, GET + POST + CHUNKED + GET])
def test_a_request_cut_at_any_byte_is_the_same_request(whole: bytes) -> None:
    expected = told(parse(whole))
    assert expected
    for cut in range(1, len(whole)):
        assert told(parse(whole[:cut], whole[cut:])) == expected
    assert told(parse(*(whole[at : at + 1] for at in range(len(whole))))) == expected


def test_a_request_has_its_parts() -> None:
    (request,) = requests(parse(POST))
    assert (request.method, request.path, request.query) == ("POST", "/v1/chat/completions", "")
    assert request.body == b'{"a": 12}'
    assert (b"content-type", b"application/json") in request.headers
    assert (b"x-empty", b"") in request.headers
    assert request.request == "r2"
    assert requests(parse(GET))[0].target == "/health?x=1"
    assert requests(parse(CHUNKED))[0].body == b'{"a": 12}'


def test_a_client_has_one_key_whoever_reads_it() -> None:
    twice = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer a\r\nauthorization: Bearer b\r\n"
    parser = parse(GET + twice + b"Content-Length: 0\r\n\r\n")
    assert len(requests(parser)) == 1
    assert str(error(parser)) == "not a HTTP/1.1 frame: it has two Authorization headers and may have one"
    once = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer a\r\nContent-Length: 0\r\n\r\n"
    assert [request.headers[1] for request in requests(parse(once * 3))] == [(b"authorization", b"Bearer a")] * 3


def test_a_trailer_is_no_header() -> None:
    (request,) = requests(parse(CHUNKED))
    assert [value for name, value in request.headers if name == b"host"] == [b"here"]


def test_a_request_without_an_id_or_a_trace_gets_both() -> None:
    parser = parse(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 2)
    first, second = (dict(request.headers) for request in requests(parser))
    assert first[b"x-request-id"] != second[b"x-request-id"]
    version, trace, span, flags = first[b"traceparent"].split(b"-")
    assert (version, len(trace), len(span), flags) == (b"00", 32, 16, b"01")


def test_an_overlong_id_is_replaced() -> None:
    (request,) = requests(parse(b"GET / HTTP/1.1\r\nHost: h\r\nX-Request-Id: " + b"x" * 129 + b"\r\n\r\n"))
    assert len(request.request) == 32


def test_headers_of_the_connection_stay_on_it() -> None:
    (request,) = requests(
        parse(
            b"GET / HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, X-Secret\r\nX-Secret: 1\r\nKeep-Alive: 3\r\n"
            b"TE: trailers\r\nProxy-Connection: x\r\nX-Kept: 1\r\n\r\n"
        )
    )
    names = {name for name, _ in request.headers}
    assert names == {b"host", b"x-kept", b"x-request-id", b"traceparent", b"forwarded", b"x-forwarded-for"}


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n",
        b"Content-Length: 1\r\nContent-Length: 1\r\n",
        b"Content-Length: 1, 1\r\n",
        b"Content-Length: +1\r\n",
        b"Content-Length : 1\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"X-Folded: a\r\n b\r\n",
        b"X-Bare: a\nContent-Length: 1\r\n",
        b"X-Null: a\x00b\r\n",
        b"X-Cr: a\rb\r\n",
        b" X-Space: a\r\n",
        b"Host: another\r\n",
        b"Expect: the unexpected\r\n",
    ],
)
def test_nothing_that_two_servers_could_read_differently_is_read(head: bytes) -> None:
    whole = b"POST /v1/x HTTP/1.1\r\nHost: h\r\n" + head + b"\r\n1\r\na\r\n0\r\n\r\n" + GET
    parser = parse(whole)
    assert requests(parser) == []
    assert isinstance(error(parser), FrameInvalid | Unsupported)
    bytewise = parse(*(whole[at : at + 1] for at in range(len(whole))))
    assert type(error(bytewise)) is type(error(parser))
    assert len(bytewise.ready) == 1


@pytest.mark.parametrize(
    "whole",
    [
        b"GET / HTTP/2.0\r\nHost: h\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\nHost: h\n\n",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1 \r\na\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\na",
    ],
)
def test_what_is_not_http_1_is_refused_once(whole: bytes) -> None:
    parser = parse(whole, GET)
    assert len(parser.ready) == 1
    assert isinstance(error(parser), FrameInvalid | Unsupported)


def test_a_refusal_comes_after_what_was_asked_before_it() -> None:
    parser = parse(GET + b"nonsense\r\n\r\n" + GET)
    assert len(requests(parser)) == 1
    assert isinstance(error(parser), FrameInvalid)


def test_a_declared_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    parser = parse(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 11\r\n\r\n", limits=RelayLimits(body_bytes=10))
    assert isinstance(error(parser), BodyTooLarge)


def test_a_chunked_body_over_the_limit_is_refused_when_it_passes_it() -> None:
    head = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert parse(head, b"a\r\n0123456789\r\n", limits=RelayLimits(body_bytes=10)).stage is Stage.BODY
    parser = parse(head, b"a\r\n0123456789\r\n", b"1\r\nx\r\n", limits=RelayLimits(body_bytes=10))
    assert isinstance(error(parser), BodyTooLarge)


def test_endless_trailers_and_extensions_are_refused() -> None:
    head = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    limits = RelayLimits(head_bytes=100)
    for start in (b"0\r\nX-Trailer: ", b"1;ext="):
        parser = parse(head, start, *[b"x" * 50] * 3, limits=limits)
        assert isinstance(error(parser), BodyTooLarge)


def test_headers_over_the_limit_are_refused_in_one_piece_or_many() -> None:
    limits = RelayLimits(head_bytes=200)
    whole = b"GET / HTTP/1.1\r\nHost: h\r\nX-Long: " + b"x" * 300 + b"\r\n\r\n"
    assert isinstance(error(parse(whole, limits=limits)), HeadTooLarge)
    assert isinstance(
        error(parse(*(whole[at : at + 7] for at in range(0, len(whole), 7)), limits=limits)), HeadTooLarge
    )
    assert isinstance(error(parse(b"GET /" + b"x" * 300, limits=limits)), HeadTooLarge)
    assert isinstance(error(parse(GET + whole, limits=limits)), HeadTooLarge)
    assert isinstance(error(parse(GET * 9 + whole[:100], *[b"x" * 60] * 4, limits=limits)), HeadTooLarge)
    assert len(requests(parse(GET * 9 + whole[:100], limits=limits))) == 9


def test_a_body_that_comes_with_its_head_does_not_count_as_head() -> None:
    whole = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 300\r\n\r\n" + b"x" * 300
    assert len(requests(parse(whole + whole, limits=RelayLimits(head_bytes=200)))) == 2


def test_a_wish_to_upgrade_is_passed_over() -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\n"
    parser = parse(b"GET /a HTTP/1.1\r\nHost: h\r\n" + upgrade + b"\r\n" + GET)
    assert [request.path for request in requests(parser)] == ["/a", "/health"]
    assert {name for name, _ in requests(parser)[0].headers}.isdisjoint({b"upgrade", b"http2-settings"})
    for framing, body in ((b"Content-Length: 3", b"abc"), (b"Transfer-Encoding: chunked", b"3\r\nabc\r\n0\r\n\r\n")):
        whole = b"PUT /a HTTP/1.1\r\nHost: h\r\n" + upgrade + framing + b"\r\n\r\n" + body
        for pieces in ([whole + GET], [whole[at : at + 1] for at in range(len(whole))]):
            parser = parse(*pieces)
            (request,) = requests(parser)
            assert (request.method, request.path, request.body) == ("PUT", "/a", b"abc")
            assert parser.ended


def test_a_client_that_asks_before_sending_is_known() -> None:
    head = b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-Continue\r\nContent-Length: 1\r\n\r\n"
    assert parse(head).wants_continue
    parser = parse(head, b"x")
    assert not parser.wants_continue
    assert len(requests(parser)) == 1
    assert not parse(head.replace(b"HTTP/1.1", b"HTTP/1.0")).wants_continue


def test_after_the_last_request_nothing_is_read() -> None:
    parser = parse(b"GET /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" + GET, GET)
    assert [request.path for request in requests(parser)] == ["/a"]
    assert parser.ended
    assert requests(parse(b"GET /a HTTP/1.0\r\n\r\n"))[0].path == "/a"


def test_what_a_body_says_of_a_protocol_refuses_nobody_and_admits_nobody() -> None:
    head = b"POST /v1/x HTTP/1.1\r\nHost: h\r\n"
    said = head.replace(b"HTTP/1.1", b"RTSP/1.0")
    quoting = head + b"Content-Length: %d\r\n\r\n%b" % (len(said), said)
    assert [one.body for one in requests(parse(quoting * 3))] == [said] * 3
    assert [one.body for one in requests(parse(quoting[:60], quoting[60:] + quoting))] == [said] * 2
    parser = parse(quoting + said + b"\r\n")
    assert len(requests(parser)) == 1
    assert "single spaces" in str(error(parser))


def test_a_target_in_absolute_form_is_its_path() -> None:
    assert requests(parse(b"GET http://h:1/a/b?c=d HTTP/1.1\r\nHost: h\r\n\r\n"))[0].target == "/a/b?c=d"
    assert requests(parse(b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n"))[0].target == "*"


@pytest.mark.parametrize(
    ("method", "path", "data"),
    [
        ("POST", "/v1/chat/completions", True),
        ("POST", "/generate", True),
        ("GET", "/v1/models", False),
        ("POST", "/flush_cache", False),
        ("POST", "/v1/../flush_cache", False),
        ("POST", "/v1/%2e%2e/flush_cache", False),
        ("POST", "/v1//x", False),
        ("POST", "/v1", False),
        ("POST", "/v1/", False),
        ("POST", "/v1/chat/completions/", False),
        ("POST", "/v1/a/.b", False),
        ("POST", "/v1/a\\..\\..\\flush_cache", False),
        ("POST", "/v1/a;/../flush_cache", False),
        ("POST", "/v1/..;/flush_cache", False),
        ("POST", '/v1/"', False),
        ("POST", "/v1/rerank", True),
        ("POST", "/v1/audio/v1.5:batch", True),
        ("GET", "/v1/responses/resp_1", True),
        ("DELETE", "/v1/responses/resp_1", True),
        ("GET", "/v1/responses/resp_1/input_items", True),
        ("GET", "/v1/responses/../models", False),
        ("GET", "/v1/responses", False),
        ("PUT", "/v1/responses/resp_1", False),
        ("GET", "/v1/chat/completions", False),
        ("DELETE", "/generate", False),
    ],
)
def test_only_plain_paths_of_the_data_path_are_data(method: str, path: str, data: bool) -> None:
    assert is_data(method, path) is data


def post_of(length: bytes, body: bytes, extra: bytes = b"") -> bytes:
    head = b"POST /v1/x?q=1 HTTP/1.1\r\nHost: h\r\nX-A: a\r\nContent-Length: %b\r\n%bX-B: b\r\n\r\n"
    return head % (length, extra) + body


def seen(item: object) -> tuple[object, ...]:
    assert isinstance(item, Incoming)
    request = item.request
    named = sorted(header for header in request.headers if header[0] not in {b"x-request-id", b"traceparent"})
    return (request.method, request.target, request.body, named, item.keep_alive, item.http10)


@pytest.mark.parametrize(
    "second",
    [
        post_of(b"3", b"two"),
        post_of(b"0", b""),
        post_of(b"3", b"two") + post_of(b"5", b"three"),
        post_of(b"3", b"two", b"X-C: c\r\n"),
        post_of(b"3", b"two", b"traceparent: 00-a-b-01\r\n"),
        post_of(b"3", b"two").replace(b"X-A: a", b"X-A: b"),
        post_of(b"3", b"two").replace(b"HTTP/1.1", b"HTTP/1.0"),
        post_of(b"3", b"two", b"Connection: close\r\n"),
        post_of(b"6", b"3\r\n\r\nX"),
        GET,
    ],
)
def test_a_head_seen_before_changes_nothing_about_what_is_read(second: bytes) -> None:
    used = parse(*(post_of(b"%d" % len(body), body) for body in (b"zero", b"one", b"once more")), second)
    fresh = parse(second)
    assert [seen(item) for item in list(used.ready)[3:]] == [seen(item) for item in fresh.ready]
    assert (used.ended, used.stage) == (fresh.ended, fresh.stage)
    assert len({item.request.request for item in used.ready if isinstance(item, Incoming)}) == len(used.ready)


@pytest.mark.parametrize(
    "second",
    [
        post_of(b"+3", b"two"),
        post_of(b"-3", b"two"),
        post_of(b"0x3", b"two"),
        post_of(b"3 3", b"two"),
        post_of(b"", b"two"),
        post_of(b"3,3", b"two"),
        post_of(b"\xb2", b"tw"),
        post_of(b"3", b"two", b"Content-Length: 3\r\n"),
        post_of(b"3", b"two", b"Transfer-Encoding: chunked\r\n"),
        post_of(b"99999999999999999999", b"two"),
        post_of(b"99999999", b"two"),
    ],
)
def test_a_head_seen_before_lets_nothing_pass_that_would_be_refused(second: bytes) -> None:
    used = parse(*[post_of(b"3", b"one")] * 3, second, limits=RelayLimits(body_bytes=1000))
    assert len(used.ready) == 4
    assert used.ended
    fresh = parse(second, limits=RelayLimits(body_bytes=1000))
    assert type(error(used)) is type(error(fresh))
