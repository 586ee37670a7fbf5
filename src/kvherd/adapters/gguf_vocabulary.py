"""The vocabulary and chat template in a GGUF, as a tokenizer of the package `tokenizers`."""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from kvherd.adapters.sentencepiece import build_tokenizer
from kvherd.adapters.vocabulary import Vocabulary
from kvherd.core.errors import FrameInvalid, ModelMissing, ModelUnsupported
from kvherd.wire.gguf import Value, decode_head

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a GGUF's vocabulary. Raises `ModelMissing` and `ModelUnsupported` with the reason."""
    metadata = _metadata(path)
    tokens = _strings(path, metadata, "tokens")
    tokenizer = _tokenizer(path, metadata, tokens)
    _add_special(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type"))
    named = {name: _named(tokens, metadata, key) for name, key in _NAMED.items()}
    bos = named["bos_token"]
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", _adds_bos_unsaid(metadata)) is True:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    return Vocabulary(tokenizer, _tokenizer_config(metadata, named), _model_config(metadata, len(tokens)))


def _tokenizer(path: Path, metadata: Mapping[str, Value], tokens: list[str]) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelUnsupported(
            str(path),
            f"its tokenizer is {kind!r}; byte-level BPE ('gpt2') and SentencePiece's BPE ('llama') are read here",
        )
    build = _byte_level if kind == "gpt2" else _sentencepiece
    try:
        return build(path, metadata, tokens)
    except ModelUnsupported:
        raise
    except Exception as error:  # `tokenizers` raises nothing narrower for merges of unknown tokens
        raise ModelUnsupported(str(path), f"its vocabulary does not hold together: {error}") from error


def _byte_level(path: Path, metadata: Mapping[str, Value], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in _strings(path, metadata, "merges")],
            ignore_merges=pre == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(path, pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(path: Path, metadata: Mapping[str, Value], tokens: list[str]) -> Tokenizer:
    return build_tokenizer(
        tokens,
        _numbers(path, metadata, "scores"),
        [int(kind) for kind in _numbers(path, metadata, "token_type")],
        prefix_space=metadata.get("tokenizer.ggml.add_space_prefix", True) is True,
    )


def _adds_bos_unsaid(metadata: Mapping[str, Value]) -> bool:
    """Whether a first token is added where the file does not say; so llama.cpp has it."""
    return metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"


_NAMED = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def _metadata(path: Path) -> Mapping[str, Value]:
    try:
        with path.open("rb") as file:
            # Closed with its last view, not here: the traceback of an error may still hold one.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return decode_head(memoryview(mapped)).metadata
    except FrameInvalid as error:
        raise ModelMissing(str(path), f"the file is not a whole GGUF: {error.problem}") from error
    except ValueError as error:  # what mmap says of an empty file
        raise ModelMissing(str(path), "the file is empty") from error
    except OSError as error:
        raise ModelMissing(str(path), error.strerror or str(error)) from error


def _strings(path: Path, metadata: Mapping[str, Value], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ModelUnsupported(str(path), f"it has no list tokenizer.ggml.{name}")
    return [str(each) for each in value]


def _numbers(path: Path, metadata: Mapping[str, Value], name: str) -> list[float]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list):
        raise ModelUnsupported(str(path), f"it has no list tokenizer.ggml.{name}")
    return [float(each) for each in value if isinstance(each, int | float)]


def _pair(merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    return first, second


def _pre_tokenizer(path: Path, pre: Value) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging, by llama.cpp's name for it."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    match pre:
        case "smollm" | "starcoder" | "refact" | "command-r":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        case "default" | "gpt-2":
            return byte_level
        case "llama-bpe" | "llama3" | "llama-v3":
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(_LLAMA3), behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        case _:
            raise ModelUnsupported(str(path), f"its tokenizer cuts text the way of {pre!r}, unknown here")


def _add_special(tokenizer: Tokenizer, tokens: list[str], kinds: Value | None) -> None:
    """Control tokens and the unknown one are special; words that the maker added are plain text, but matched whole."""
    if isinstance(kinds, list):
        typed = list(zip(tokens, kinds, strict=False))
        special = [token for token, kind in typed if kind in (_UNKNOWN, _CONTROL)]
        words = [token for token, kind in typed if kind == _USER_DEFINED]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in words])


def _named(tokens: list[str], metadata: Mapping[str, Value], key: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _tokenizer_config(metadata: Mapping[str, Value], named: Mapping[str, str | None]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get("llama.context_length"),
        **{name: token for name, token in named.items() if token is not None},
    }
    template = metadata.get("tokenizer.chat_template")
    return {**config, "chat_template": template} if isinstance(template, str) else config


def _model_config(metadata: Mapping[str, Value], vocab_size: int) -> dict[str, Any]:
    heads = metadata.get("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": metadata.get("llama.embedding_length"),
        "intermediate_size": metadata.get("llama.feed_forward_length"),
        "num_hidden_layers": metadata.get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "max_position_embeddings": metadata.get("llama.context_length"),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
