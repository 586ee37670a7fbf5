"""Errors have the shape that OpenAI's clients read, and tell strangers nothing of our defects."""

import json

from kvherd.core.errors import FieldInvalid, ModelUnknown, NoWorker, OptionInvalid
from kvherd.wire.openai.errors import error_body


def test_a_callers_error_names_the_field() -> None:
    status, body = error_body(FieldInvalid("temperature", "must be 0 or more"))
    assert status == 400
    assert json.loads(body)["error"] == {
        "message": "temperature: must be 0 or more",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": "invalid_value",
    }


def test_statuses_come_from_the_table() -> None:
    assert error_body(ModelUnknown("x", ("m",)))[0] == 404
    assert error_body(NoWorker("m", ()))[0] == 503


def test_a_defect_keeps_its_text_to_itself() -> None:
    status, body = error_body(KeyError("secret"))
    assert status == 500
    assert b"secret" not in body


def test_what_a_client_wrote_is_repeated_in_part_only() -> None:
    for error in (ModelUnknown("x" * 10**6, ("m",)), FieldInvalid("x" * 10**6, "must not be")):
        told = json.loads(error_body(error)[1])["error"]
        assert len(told["message"]) < 10_000
        assert len(told["param"]) < 300


def test_a_field_of_a_worker_is_named_and_an_option_of_the_command_line_is_none() -> None:
    told = [
        json.loads(error_body(OptionInvalid(name, "must be"))[1])["error"]["param"] for name in ("weight", "--port")
    ]
    assert told == ["weight", None]
