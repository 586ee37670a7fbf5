from kvherd.services.gateway.witness import SeenUsage, Witness
from kvherd.testing.workers import FakeResponder


def seen(*chunks: bytes) -> tuple[Witness, FakeResponder]:
    inner = FakeResponder()
    witness = Witness(inner, clock=lambda: 1.5)
    witness.headers = [(b"x-ours", b"yes")]
    witness.start(200, [(b"X-Ours", b"forged"), (b"content-type", b"text/plain")])
    for chunk in chunks:
        witness.write(chunk)
    witness.end()
    return witness, inner


def test_everything_is_passed_on_with_our_headers_added() -> None:
    witness, inner = seen(b"a", b"b")
    assert (inner.status, inner.body, inner.ended) == (200, b"ab", True)
    assert inner.headers == {"content-type": "text/plain", "x-ours": "yes"}
    assert witness.first_byte_at_s == 1.5


def test_usage_is_read_wherever_the_answer_was_cut() -> None:
    usage = b'{"prompt_tokens":12,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens": 8}}'
    body = b'{"choices":[],"usage":' + usage + b"}"
    for cut in range(len(body)):
        witness, _ = seen(b"x" * 9000, body[:cut], body[cut:])
        assert witness.usage() == SeenUsage(prompt_tokens=12, completion_tokens=3, cached_tokens=8)


def test_a_text_that_speaks_of_usage_fools_nobody() -> None:
    witness, _ = seen(rb'{"content":"\"usage\": {\"prompt_tokens\": 7}"}')
    assert witness.usage() == SeenUsage()


def test_sglangs_own_answers_tell_their_counts_too() -> None:
    witness, _ = seen(b'{"text":"x","meta_info":{"prompt_tokens":5,"completion_tokens":1,"cached_tokens":4}}')
    assert witness.usage() == SeenUsage(5, 1, 4)
