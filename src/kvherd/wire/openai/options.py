"""What chat and text completions share: how to sample, when to stop, what to refuse by name."""

from typing import Any

from kvherd.core.engine.generation import Limits, Sampling
from kvherd.core.errors import FieldInvalid, Unsupported
from kvherd.core.text.calls import CallOptions
from kvherd.wire.openai.body import json_name
from kvherd.wire.openai.fields import Fields, text_item, token_item

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20
MOST_TOKENS = 2**31 - 1

# Fields that would change the answer and that we cannot honour, by what makes them harmless.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "modalities": (["text"], []),
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "store": (False,),
    "reasoning_effort": ("none",),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "regex": (),
    "json_schema": (),
    "ebnf": (),
    "lora_path": (),
    "chat_template": (),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "session_params": ({},),
}


def read_options(fields: Fields, *, logprobs: int | None) -> CallOptions:
    """Raises `FieldInvalid` or `Unsupported`, naming the field."""
    refuse_what_we_cannot_do(fields)
    stream = fields.flag("stream")
    max_new_tokens = _max_new_tokens(fields)
    return CallOptions(
        model=fields.required_text("model", "name the model that should answer"),
        sampling=read_sampling(fields, logprobs=logprobs),
        max_new_tokens=max_new_tokens,
        limits=read_limits(fields, max_new_tokens),
        n=_choices(fields),
        stream=stream,
        include_usage=_include_usage(fields, stream=stream),
        cache_salt=fields.text("cache_salt", None) or None,
        user=fields.text("user", None),
        skip_special_tokens=fields.flag("skip_special_tokens", default=True),
        rank=read_rank(fields),
    )


def read_rank(fields: Fields) -> int | None:
    """SGLang's fields, the old and the new, for the rank that is to serve a call."""
    rank = fields.integer("data_parallel_rank", None, low=0, high=MOST_TOKENS)
    return fields.integer("routed_dp_rank", rank, low=0, high=MOST_TOKENS)


def refuse_what_we_cannot_do(fields: Fields) -> None:
    for name, harmless in _REFUSED.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise Unsupported(name)
    form = fields.mapping("response_format").get("type", "text")
    if form != "text":
        raise Unsupported(f"response_format {form}" if isinstance(form, str) else "response_format")


def read_sampling(fields: Fields, *, logprobs: int | None, seed: str = "seed") -> Sampling:
    """`seed` is what the field of this name is called here."""
    return Sampling(
        temperature=fields.number("temperature", 1.0, low=0.0, high=2.0),
        top_p=_above_zero(fields, "top_p", high=1.0),
        top_k=fields.integer("top_k", -1, low=-1, high=MOST_TOKENS) or -1,  # 0 is another way to say all
        min_p=fields.number("min_p", 0.0, low=0.0, high=1.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, low=-2.0, high=2.0),
        presence_penalty=fields.number("presence_penalty", 0.0, low=-2.0, high=2.0),
        repetition_penalty=_above_zero(fields, "repetition_penalty", high=2.0),
        logit_bias=_logit_bias(fields),
        seed=fields.integer(seed, None, low=-(2**63), high=2**63 - 1),
        logprobs=logprobs,
    )


def _above_zero(fields: Fields, name: str, *, high: float) -> float:
    value = fields.number(name, 1.0, low=0.0, high=high)
    if value == 0:
        raise fields.invalid(name, f"must be greater than 0 and at most {high:g}, not 0")
    return value


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    biases = fields.mapping("logit_bias")
    inner = Fields(biases, fields.at("logit_bias"))
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise inner.invalid(key, "keys must be token ids")
    return tuple((int(key), inner.number(key, 0.0, low=-100.0, high=100.0)) for key in biases)


def _max_new_tokens(fields: Fields) -> int | None:
    name = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
    return fields.integer(name, None, low=1, high=MOST_TOKENS)


def read_limits(fields: Fields, max_new_tokens: int | None, *, least: str = "min_tokens") -> Limits:
    """`least` is what the field of the fewest tokens is called here."""
    min_new_tokens = fields.integer(least, 0, low=0, high=MOST_TOKENS)
    if max_new_tokens is not None and min_new_tokens > max_new_tokens:
        raise fields.invalid(least, f"must not be above the most allowed, {max_new_tokens}")
    return Limits(
        max_new_tokens=max_new_tokens or 0,
        min_new_tokens=min_new_tokens,
        stop_token_ids=fields.sequence("stop_token_ids", token_item, most=128),
        ignore_eos=fields.flag("ignore_eos"),
        stop=_stops(fields),
    )


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if isinstance(value, str):
        return (value,) if value else ()
    if value is not None and not isinstance(value, list):
        raise fields.invalid("stop", f"must be a string or a list of strings, not {json_name(value)}")
    return fields.sequence("stop", text_item, most=MOST_STOPS)


def _choices(fields: Fields) -> int:
    n = fields.integer("n", 1, low=1, high=MOST_CHOICES)
    best_of = fields.integer("best_of", n, low=1, high=MOST_CHOICES)
    if best_of not in (1, n):
        raise Unsupported("best_of")
    if best_of < n:
        raise fields.invalid("best_of", f"must not be below n, {n}")
    return n


def _include_usage(fields: Fields, *, stream: bool) -> bool:
    options = fields.mapping("stream_options")
    if options and not stream:
        raise FieldInvalid(fields.at("stream_options"), "is for streams only; set stream to true or leave it out")
    return Fields(options, fields.at("stream_options")).flag("include_usage")
