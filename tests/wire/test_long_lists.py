"""Long lists of token ids are taken out of a body, and nothing else changes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.errors import BodyNotJson, PromptTooLong
from kvherd.wire.long_lists import cut_ids, decode_long_completion, decode_long_generate, peek_long
from kvherd.wire.openai.requests import decode_completion
from kvherd.wire.openai.routing import peek
from kvherd.wire.sglang_native import decode_generate

PIECE = 16
IDS = list(range(1000, 1100))
MANY = [number % 50_000 for number in range(100_000)]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=10, max_size=60), st.sampled_from([",", ", ", " ,\n "]), st.data())
def test_a_body_is_cut_in_two_and_can_be_put_together(ids: list[int], comma: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["prompt", "input_ids", "input"]))
    text = f'{{"model":"m","{name}" : [ {comma.join(map(str, ids))} ],"n":2}}'.encode()
    cut = cut_ids(text, piece_bytes=data.draw(st.integers(1, 9)))
    assert cut is not None
    assert [list(one) for one in cut.lists] == [ids]
    assert cut.whole(cut.rest) == text
    assert json.loads(cut.rest)["n"] == 2


def test_each_list_of_several_is_read() -> None:
    lists = [IDS, [1], IDS[::-1]]
    body = json.dumps({"prompt": lists, "model": "m", "max_tokens": 7}).encode()
    cut = cut_ids(body, piece_bytes=PIECE)
    assert cut is not None
    assert [list(one) for one in cut.lists] == lists
    assert cut.filled(decode_completion(cut.rest), 100) == decode_completion(body)
    with pytest.raises(PromptTooLong, match="the prompt has 100 tokens and 7 for the answer"):
        cut.filled(decode_completion(cut.rest), 99)


@pytest.mark.parametrize(
    "value",
    [
        "[1,2]",
        f"[{','.join(['1'] * 40)},]",
        f"[{','.join(['1'] * 40)},,2]",
        f"[,{','.join(['1'] * 40)}]",
        f"[{' '.join(['1'] * 40)}]",
        f"[{','.join(['01'] * 40)}]",
        f"[{','.join(['4294967296'] * 40)}]",
        f"[[{','.join(['1'] * 40)}]",
        f"[[{','.join(['1'] * 40)}],[]]",
        f"[[{','.join(['1'] * 40)}] [1]]",
        f"[[{','.join(['1'] * 40)}],1]",
        f"[[[{','.join(['1'] * 40)}]]]",
        f"[{','.join(['1'] * 40)},-5]",
        f"[{','.join(['1'] * 40)},1.5]",
        f'[{",".join(["1"] * 40)},"x"]',
        f"[{','.join(['1'] * 40)}",
        '"a text"',
    ],
)
def test_what_is_no_long_list_of_token_ids_is_left_to_whoever_reads_the_whole(value: str) -> None:
    for text in (f'{{"prompt":{value},"n":1}}', f'{{"prompt":{value}'):
        assert cut_ids(text.encode(), piece_bytes=PIECE) is None


def test_what_stands_in_a_text_is_not_taken_for_a_list() -> None:
    said = json.dumps({"prompt": IDS})
    body = json.dumps({"messages": [{"role": "user", "content": said}], "x": ["prompt", IDS]}).encode()
    assert cut_ids(body, piece_bytes=PIECE) is None


def test_a_client_that_writes_the_mark_itself_is_read_as_a_whole() -> None:
    body = json.dumps({"prompt": IDS, "other": 2**31 - 2}).encode()
    assert cut_ids(body, piece_bytes=PIECE) is None


def test_a_list_further_inside_is_none_of_the_prompt() -> None:
    body = json.dumps({"model": "m", "deep": {"prompt": IDS}, "prompt": "hello"}).encode()
    cut = cut_ids(body, piece_bytes=PIECE)
    assert cut is not None
    call = decode_completion(cut.rest)
    assert cut.first(call.prompts) is None
    assert cut.filled(call, 1) == call


def test_all_but_the_list_is_peeked_at_as_before() -> None:
    body = json.dumps({"model": "m", "prompt": MANY, "stream": True, "user": "u"}).encode()
    asked, cut = peek_long(body)
    whole = peek(body)
    assert cut is not None
    assert (asked.model, asked.stream, asked.user) == (whole.model, whole.stream, whole.user)
    assert cut.raw == bytes(whole.prompt)


def test_what_is_wrong_is_told_as_before() -> None:
    body = b'{"model":"m","prompt":[' + b"1," * 300_000 + b"]}"
    with pytest.raises(BodyNotJson) as whole:
        peek(body)
    with pytest.raises(BodyNotJson) as cut:
        peek_long(body)
    assert str(cut.value) == str(whole.value)


@pytest.mark.parametrize("prompt", [MANY, [MANY, [1, 2]], "a text", ["two", "texts"]])
def test_a_long_completion_is_decoded_as_a_short_one(prompt: object) -> None:
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 3}).encode()
    assert decode_long_completion(body, most_tokens=100_000) == decode_completion(body)


@pytest.mark.parametrize("field", [{"input_ids": MANY}, {"input_ids": [MANY, MANY]}, {"text": "hello"}])
def test_a_long_native_call_is_decoded_as_a_short_one(field: dict[str, object]) -> None:
    body = json.dumps({**field, "sampling_params": {"max_new_tokens": 3}}).encode()
    assert decode_long_generate(body, most_tokens=100_000) == decode_generate(body)
