"""Vocabularies in GGUF files: the ways of cutting text, and what is refused."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from gguf import GGUFWriter

from kvherd.adapters.gguf_vocabulary import read_vocabulary
from kvherd.adapters.tokenizer import ModelTokenizer
from kvherd.adapters.vocabulary import byte_characters
from kvherd.core.errors import ModelMissing, ModelUnsupported

BYTES = [character for character, _ in sorted(byte_characters().items(), key=lambda pair: pair[1])]
TOKENS = [*BYTES, "Ġa", "12", "ab", "<s>", "<added>"]
KINDS = [*[1] * 259, 3, 4]
MERGES = ["Ġ a", "1 2", "a b"]


def write(path: Path, entries: Mapping[str, object] | None = None) -> Path:
    writer = GGUFWriter(path, "llama")
    wanted: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 259,
        "llama.context_length": 77,
        **(entries or {}),
    }
    for key, value in wanted.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def tokenizer(path: Path, **entries: object) -> ModelTokenizer:
    named = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    return ModelTokenizer(read_vocabulary(write(path / "model.gguf", named)))


@pytest.mark.parametrize(("pre", "digits"), [("gpt-2", ["12"]), ("smollm", ["1", "2"]), ("llama-bpe", ["12"])])
def test_text_is_cut_the_way_the_file_names(tmp_path: Path, pre: str, digits: list[str]) -> None:
    made = tokenizer(tmp_path, pre=pre)
    assert [made.token_text(token) for token in made.encode("ab a12")] == ["ab", " a", *digits]
    assert made.decode(made.encode("ab a12")) == "ab a12"
    assert made.model_max_tokens == 77


def test_control_tokens_are_special_and_added_words_are_not(tmp_path: Path) -> None:
    made = tokenizer(tmp_path)
    assert made.special_tokens == {"<s>": 259}
    assert made.encode("ab<s><added>") == [258, 259, 260]
    assert made.decode([258, 259, 260]) == "ab<added>"


def test_a_first_token_is_added_when_asked_and_the_model_wants_one(tmp_path: Path) -> None:
    assert tokenizer(tmp_path, add_bos_token=True).encode("ab", add_special_tokens=True) == [259, 258]
    assert tokenizer(tmp_path, add_bos_token=True).encode("ab") == [258]
    assert tokenizer(tmp_path, add_bos_token=False).encode("ab", add_special_tokens=True) == [258]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"model": "bert"}, "its tokenizer is 'bert'"),
        ({"pre": "dinosaur"}, "the way of 'dinosaur'"),
        ({"merges": ["no such"]}, "does not hold together"),
        ({"tokens": None}, "it has no list tokenizer.ggml.tokens"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_refused(tmp_path: Path, entries: dict[str, object], said: str) -> None:
    with pytest.raises(ModelUnsupported, match=said):
        tokenizer(tmp_path, **entries)


@pytest.mark.parametrize(("content", "said"), [(b"", "the file is empty"), (b"hello", "is not a whole GGUF")])
def test_what_is_no_gguf_is_missing(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelMissing, match=said):
        read_vocabulary(tmp_path / "model.gguf")


def test_no_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="No such file"):
        read_vocabulary(tmp_path / "model.gguf")
