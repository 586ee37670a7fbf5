"""The shape of a Llama: what its GGUF says of it, checked."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvherd.core.errors import ModelUnsupported
from kvherd.wire.gguf import GgufHead, Value


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A transformer of the Llama family: grouped-query attention, rotary positions, SwiGLU, RMS norms.

    `rope_divisors` has a number for each rotated pair, by which it turns slower than `rope_base` says; empty: none.
    """

    vocab_size: int
    hidden_size: int
    feed_forward_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    context_tokens: int
    rope_base: float = 10000.0
    rms_epsilon: float = 1e-5
    eos_token_ids: tuple[int, ...] = ()
    rope_divisors: tuple[float, ...] = ()

    @property
    def group(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.heads // self.kv_heads


def shape_of(path: str, head: GgufHead) -> LlamaShape:
    """Read the shape from a GGUF's head. Raises `ModelUnsupported` for what this engine cannot run."""
    entries = _Entries(path, head.metadata)
    architecture = head.metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelUnsupported(path, f"its architecture is {architecture!r}, and only 'llama' runs here")
    heads, hidden = entries.integer("attention.head_count"), entries.integer("embedding_length")
    if heads < 1 or (hidden % heads and not entries.has("attention.key_length")):
        raise ModelUnsupported(path, f"{hidden} columns cannot be shared among {heads} heads")
    head_size = entries.integer("attention.key_length", hidden // heads)
    shape = LlamaShape(
        vocab_size=_vocab_size(path, head),
        hidden_size=hidden,
        feed_forward_size=entries.integer("feed_forward_length"),
        layers=entries.integer("block_count"),
        heads=heads,
        kv_heads=entries.integer("attention.head_count_kv", heads),
        head_size=head_size,
        context_tokens=entries.integer("context_length"),
        rope_base=entries.number("rope.freq_base", 10000.0),
        rms_epsilon=entries.number("attention.layer_norm_rms_epsilon", 1e-5),
        eos_token_ids=_eos(head.metadata),
        rope_divisors=_linear_scaling(entries, head_size),
    )
    _refuse_variants(path, entries, shape)
    return shape


class _Entries:
    """The `llama.*` entries; a missing or mistyped one is the file's fault and named."""

    def __init__(self, path: str, metadata: Mapping[str, Value]) -> None:
        self._path = path
        self._metadata = metadata

    def has(self, key: str) -> bool:
        return f"llama.{key}" in self._metadata

    def number(self, key: str, default: float | None = None) -> float:
        value = self._metadata.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelUnsupported(self._path, f"its entry llama.{key} is {value!r}, where a number should be")
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._metadata.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelUnsupported(self._path, f"its entry llama.{key} is {value!r}, where a count should be")
        return value

    def text(self, key: str, default: str) -> str:
        return str(self._metadata.get(f"llama.{key}", default))


def _refuse_variants(path: str, entries: _Entries, shape: LlamaShape) -> None:
    """A variant computed as a plain Llama would answer nonsense without a word; so each is refused by name."""
    if entries.has("expert_count") and entries.integer("expert_count", 1) > 1:
        raise ModelUnsupported(path, "it is a mixture of experts")
    if entries.text("rope.scaling.type", "none") not in ("none", "", "linear"):
        raise ModelUnsupported(path, f"it scales its positions ({entries.text('rope.scaling.type', '')})")
    if entries.integer("attention.value_length", shape.head_size) != shape.head_size:
        raise ModelUnsupported(path, "its keys and values differ in size")
    if entries.integer("rope.dimension_count", shape.head_size) != shape.head_size or shape.head_size % 2:
        raise ModelUnsupported(path, "it rotates only a part of each head")
    if shape.heads % shape.kv_heads:
        raise ModelUnsupported(path, f"{shape.heads} heads cannot share {shape.kv_heads} heads of keys and values")


def _linear_scaling(entries: _Entries, head_size: int) -> tuple[float, ...]:
    """Positions stretched over a longer context, all pairs alike."""
    if entries.text("rope.scaling.type", "none") != "linear":
        return ()
    return (entries.number("rope.scaling.factor"),) * (head_size // 2)


def _vocab_size(path: str, head: GgufHead) -> int:
    for tensor in head.tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) == 2:
            return tensor.shape[0]
    raise ModelUnsupported(path, "it has no token embedding")


def _eos(metadata: Mapping[str, Value]) -> tuple[int, ...]:
    """End of text and end of turn; a chat model may name either or both."""
    found = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return tuple(dict.fromkeys(int(token) for token in found if isinstance(token, int)))
