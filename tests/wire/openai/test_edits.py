"""Edits add what they must and leave every other byte alone."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.errors import FieldInvalid
from kvherd.wire.openai import edits
from kvherd.wire.openai.edits import with_full_report, with_usage
from kvherd.wire.openai.routing import Peek, peek

FULL = {"kv_cache_report_mode": "full"}


def reported(body: bytes) -> bytes | None:
    return with_full_report(body, peek(body))


def test_a_stream_is_asked_for_its_usage_and_the_rest_arrives_as_it_was_written() -> None:
    body = b'{ "model":"m", "a": 1.50e+0,"a" :2, "stream" : true }\n'
    edited = with_usage(body, peek(body))
    assert edited == b'{ "model":"m", "a": 1.50e+0,"a" :2, "stream" : true ,"stream_options":{"include_usage":true}}\n'


@pytest.mark.parametrize(
    "body",
    [
        b'{"stream":false}',
        b'{"model":"m"}',
        b'{"stream":true,"stream_options":null}',
        b'{"stream":true,"stream_options":{}}',
        b'{"stream":true,"stream\\u005foptions":{"include_usage":true}}',
    ],
)
def test_who_does_not_stream_or_speaks_of_it_is_left_alone(body: bytes) -> None:
    assert with_usage(body, peek(body)) is None


def test_a_full_report_is_asked_for_beside_what_the_client_asks() -> None:
    assert reported(b'{"model": "m"} ') == b'{"model": "m","vllm_xargs":{"kv_cache_report_mode":"full"}} '
    assert reported(b"{ }") == b'{ "vllm_xargs":{"kv_cache_report_mode":"full"}}'
    assert (
        reported(b'{"vllm_xargs" : {"a": 1.0}, "b":2}')
        == b'{"vllm_xargs" : {"kv_cache_report_mode":"full","a": 1.0}, "b":2}'
    )
    for nothing in (b"null", b"{}", b"{ }"):
        edited = reported(b'{"vllm_xargs":' + nothing + b',"b":2}')
        assert edited == b'{"vllm_xargs":{"kv_cache_report_mode":"full"},"b":2}'


@pytest.mark.parametrize(
    "own", [b'{"kv_cache_report_mode":"incremental"}', b'{"kv_cache_report_mode":null,"a":1}', b"[1]", b'"full"', b"5"]
)
def test_a_mode_that_the_client_chose_is_never_overridden(own: bytes) -> None:
    assert reported(b'{"vllm_xargs":' + own + b"}") is None


def test_of_several_the_one_that_counts_is_edited() -> None:
    body = (
        b'{"x":{"vllm_xargs":{"a":1}},"vllm_xargs":{"a":1},"prompt":"\\"vllm_xargs\\":{\\"a\\":1}",'
        b'"y":{"vllm_xargs":{"a":1}}}'
    )
    edited = reported(body)
    assert edited is not None
    assert json.loads(edited) == json.loads(body) | {"vllm_xargs": FULL | {"a": 1}}
    assert len(edited) == len(body) + len(b'"kv_cache_report_mode":"full",')


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "vllm_xargs"]), inner, max_size=2)
    ),
)


@given(
    st.dictionaries(st.sampled_from(["a", "prompt", "x"]), JSON, max_size=3),
    st.none() | st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
    st.booleans(),
)
def test_an_edited_body_means_the_same_and_one_thing_more(
    others: dict[str, object], own: dict[str, int] | None, spaced: bool
) -> None:
    document = {**others, "stream": True, **({} if own is None else {"vllm_xargs": own})}
    body = json.dumps(document, indent=1 if spaced else None).encode()
    full, usage = reported(body), with_usage(body, peek(body))
    assert full is not None
    assert usage is not None
    assert json.loads(full) == document | {"vllm_xargs": (own or {}) | FULL}
    assert json.loads(usage) == document | {"stream_options": {"include_usage": True}}


MANY = b"[" + b",".join([b'{"model":"q","vllm_xargs":{"a":1}}'] * 3000) + b"]"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"alias","vllm_xargs":{"a":1},"x":' + MANY + b"}",
        b'{"x":' + MANY + b',"model":"alias","vllm_xargs":{"a":1}}',
        b'{"x":' + MANY + b',"model":"alias","vllm_xargs":{"a":1},"y":' + MANY + b"}",
    ],
    ids=["before", "behind", "between"],
)
def test_a_body_full_of_members_of_one_name_is_read_a_few_times_only(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each edit is tried by reading all of it, so that the gateway would stand still for minutes."""
    asked, reads = peek(body), 0

    def counted(data: bytes) -> Peek:
        nonlocal reads
        reads += 1
        return peek(data)

    monkeypatch.setattr(edits, "peek", counted)
    if body.startswith(b'{"x"') and body.endswith(b"}]}"):
        with pytest.raises(FieldInvalid, match="before or behind all members of that name further inside"):
            edits.with_model(body, "real")
        assert edits.with_full_report(body, asked) is None
    else:
        assert peek(edits.with_model(body, "real")).model == "real"
        edited = edits.with_full_report(body, asked)
        assert edited is not None
        assert bytes(peek(edited).vllm_xargs) == b'{"kv_cache_report_mode":"full","a":1}'
    assert reads < 50
