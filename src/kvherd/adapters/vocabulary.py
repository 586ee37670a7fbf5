"""A tokenizer and the Hugging Face files that describe it, from whatever source."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvherd.adapters.chat_template import CHATML

TINY_CONTEXT_TOKENS = 2048
TINY_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokenizer_config` and `model_config` are the contents of the files of these names."""

    tokenizer: Tokenizer
    tokenizer_config: Mapping[str, Any]
    model_config: Mapping[str, Any]

    @property
    def chat_template(self) -> str | None:
        """The template's text; of several named ones, the default."""
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):
            named = {each["name"]: each["template"] for each in template if {"name", "template"} <= each.keys()}
            template = named.get("default")
        return template if isinstance(template, str) else None

    @property
    def named_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and their like."""
        found = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = self.tokenizer_config.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found[name] = text
        return found

    @property
    def max_tokens(self) -> int:
        """The model's context, as its own file or else its tokenizer's says."""
        for value in (
            self.model_config.get("max_position_embeddings"),
            self.tokenizer_config.get("model_max_length"),
        ):
            if isinstance(value, int | float) and 0 < value < 1 << 40:  # HF writes 1e30 for "unknown"
                return int(value)
        return 1 << 40


def byte_characters() -> dict[str, int]:
    """The character by which byte-level vocabularies spell each byte, as GPT-2 chose them."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spelled = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    spelled.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return spelled


def tiny_vocabulary() -> Vocabulary:
    """Bytes 0…255 as themselves, then three special tokens; ChatML."""
    spelled = sorted(byte_characters().items(), key=lambda pair: pair[1])
    tokenizer = Tokenizer(models.BPE(vocab=dict(spelled), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in TINY_SPECIAL])
    end, start, stop = TINY_SPECIAL
    return Vocabulary(
        tokenizer,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": start,
            "eos_token": stop,
            "pad_token": stop,
            "unk_token": end,
            "model_max_length": TINY_CONTEXT_TOKENS,
            "chat_template": CHATML,
        },
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": TINY_CONTEXT_TOKENS,
            "bos_token_id": tokenizer.token_to_id(start),
            "eos_token_id": [tokenizer.token_to_id(stop), tokenizer.token_to_id(end)],
        },
    )


def hf_files(vocabulary: Vocabulary) -> dict[str, bytes]:
    """The vocabulary as the files of a Hugging Face directory, the same bytes every time."""
    return {
        "config.json": _json(vocabulary.model_config),
        "tokenizer.json": vocabulary.tokenizer.to_str().encode(),
        "tokenizer_config.json": _json(vocabulary.tokenizer_config),
    }


def from_hf_files(files: Mapping[str, bytes]) -> Vocabulary:
    """The inverse. `config.json` and `tokenizer_config.json` may be missing; a `chat_template.jinja` file wins.

    Raises `ValueError` with the reason.
    """
    if "tokenizer.json" not in files:
        raise ValueError("there is no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    except Exception as error:  # `tokenizers` raises nothing narrower for what it cannot parse
        raise ValueError(f"tokenizer.json cannot be read: {error}") from error
    config = _object(files, "tokenizer_config.json")
    if "chat_template.jinja" in files:
        config["chat_template"] = files["chat_template.jinja"].decode()
    return Vocabulary(tokenizer, config, _object(files, "config.json"))


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(dict(value), indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")  # noqa: TRY004 - the file's content is wrong, not a type
    return value
