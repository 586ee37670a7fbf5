"""SGLang's engine protocol on gRPC as a server speaks it: messages of `smg-grpc-proto` ↔ core values.

proto3 cannot tell an unset number from 0. So where 0 makes no sense it means unset: top_p 0 and repetition_penalty 0
are 1, top_k 0 is all, n 0 is 1. temperature 0 is greedy. A request without `sampling_params` samples with temperature
1. `logprob_start_len` 0 or less asks for no logprobs of the prompt. What the protocol has no field for travels in
`custom_params`: `seed` (a whole number, or its text, since numbers there are doubles) and `cache_salt`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.json_format import MessageToDict
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from kvherd.core.engine.generation import Finish, GenerationRequest, Limits, Sampling, TokenLogprob
from kvherd.core.engine.reports import RankLoad
from kvherd.core.errors import FieldInvalid, Unsupported
from kvherd.core.ids import Rank, RequestId

MOST_CHOICES = 128
HOLD_KEY = "kvherd-hold"
"""Metadata of FlushCache: "1" lets requests that come meanwhile wait behind the flush. The protocol has no field."""
RANKS_KEY = "kvherd-ranks"
"""Trailing metadata of FlushCache: each rank's outcome, as JSON."""
IN_DOUBT_KEY = "kvherd-in-doubt"
"""Trailing metadata of a FlushCache that failed: the engine did not answer, and may obey yet."""
ABORT_REASON_KEY = "kvherd-abort-reason"
"""Trailing metadata of Generate: why it was aborted, which the protocol has no field for."""
_SEEDS = 2**63


def decode_generate(message: pb.GenerateRequest, *, room: int) -> list[GenerationRequest]:
    """One request a choice; `room` is how many new tokens the context leaves, for a call that names no number.

    Choices of one call have ids and seeds of their own, the same whenever the call is the same. Raises `FieldInvalid`,
    or `Unsupported` for what cannot be honoured here, by name.
    """
    _refuse_what_we_cannot_do(message)
    if not message.request_id:
        raise FieldInvalid("request_id", "is missing; give one that is unique among your requests")
    n = message.sampling_params.n or 1
    if n > MOST_CHOICES:
        raise FieldInvalid("n", f"is {n}; at most {MOST_CHOICES} choices")
    one = _generation(message, room)
    return [one] if n == 1 else [_choice(one, index) for index in range(n)]


def _generation(message: pb.GenerateRequest, room: int) -> GenerationRequest:
    custom = _custom(message.sampling_params)
    return GenerationRequest(
        request=RequestId(message.request_id),
        prompt_token_ids=list(message.tokenized.input_ids),
        limits=_limits(message.sampling_params, room),
        sampling=_sampling(message, custom),
        cache_salt=_text(custom, "cache_salt"),
        lora=message.lora_id or None,
        rank=message.data_parallel_rank if message.HasField("data_parallel_rank") else None,
    )


def _choice(one: GenerationRequest, index: int) -> GenerationRequest:
    seed = one.sampling.seed
    sampling = one.sampling if seed is None else replace(one.sampling, seed=(seed + index) % _SEEDS)
    return replace(one, request=RequestId(f"{one.request}-{index}"), sampling=sampling)


def _refuse_what_we_cannot_do(message: pb.GenerateRequest) -> None:
    constraint = message.sampling_params.WhichOneof("constraint")
    asked = {
        "mm_inputs": message.HasField("mm_inputs") and message.mm_inputs.ByteSize() > 0,
        "return_hidden_states": message.return_hidden_states,
        "token_ids_logprob": bool(message.token_ids_logprob),
        "input_embeds": bool(message.input_embeds),
        "custom_logit_processor": bool(message.custom_logit_processor),
        "disaggregated_params": message.HasField("disaggregated_params"),
        "logprob_start_len above 0, which asks for logprobs of the prompt,": message.return_logprob
        and message.logprob_start_len > 0,
        f"sampling_params.{constraint}": constraint is not None and bool(getattr(message.sampling_params, constraint)),
    }
    for name, wanted in asked.items():
        if wanted:
            raise Unsupported(name)


def _limits(params: pb.SamplingParams, room: int) -> Limits:
    asked = params.max_new_tokens if params.HasField("max_new_tokens") else room
    if asked == 0:
        raise FieldInvalid("max_new_tokens", "is 0; ask for 1 or more, or leave it out for as many as fit")
    return Limits(
        max_new_tokens=asked,
        min_new_tokens=params.min_new_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        stop=tuple(params.stop),
    )


def _sampling(message: pb.GenerateRequest, custom: dict[str, Any]) -> Sampling:
    logprobs = message.top_logprobs_num if message.return_logprob else None
    if not message.HasField("sampling_params"):
        return Sampling(logprobs=logprobs)
    params = message.sampling_params
    return Sampling(
        temperature=params.temperature,
        top_p=params.top_p or 1.0,
        top_k=params.top_k or -1,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        logit_bias=tuple(_bias(key, value) for key, value in sorted(params.logit_bias.items())),
        seed=_seed(custom),
        logprobs=logprobs,
    )


def _bias(key: str, value: float) -> tuple[int, float]:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise FieldInvalid(f"logit_bias.{key}", "keys must be token ids")
    if not -100 <= value <= 100:
        raise FieldInvalid(f"logit_bias.{key}", f"is {value:g}; it must be between -100 and 100")
    return int(key), value


def _custom(params: pb.SamplingParams) -> dict[str, Any]:
    return MessageToDict(params.custom_params) if params.HasField("custom_params") else {}


def _text(custom: dict[str, Any], name: str) -> str | None:
    value = custom.get(name)
    if value is not None and not isinstance(value, str):
        raise FieldInvalid(f"custom_params.{name}", "must be a string")
    return value or None


def _seed(custom: dict[str, Any]) -> int | None:
    value = custom.get("seed")
    if value is None:
        return None
    whole = isinstance(value, str) or (isinstance(value, float) and value.is_integer())
    try:
        seed = int(value) if whole else None
    except ValueError:
        seed = None
    if seed is None or not -(2**63) <= seed < 2**63:
        raise FieldInvalid("custom_params.seed", "must be a whole number of 64 bits, or its text")
    return seed


# --- answers ---------------------------------------------------------------------------------------------------


def encode_finish(finish: Finish, complete: pb.GenerateComplete) -> None:
    """Write why a generation ended."""
    complete.finish_reason = finish.reason
    if isinstance(finish.matched, str):
        complete.matched_stop_str = finish.matched
    elif finish.matched is not None:
        complete.matched_token_id = finish.matched


def encode_reason(reason: str) -> str:
    """Any text as metadata may have it: printable ASCII, everything else escaped, and not too long."""
    return reason[:1000].encode("unicode_escape").decode("ascii")


def encode_logprobs(logprobs: Sequence[TokenLogprob]) -> pb.OutputLogProbs | None:
    """None where nobody asked for any."""
    if not logprobs:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[each.logprob for each in logprobs],
        token_ids=[each.token_id for each in logprobs],
        top_logprobs=[
            pb.TopLogProbs(values=[value for _, value in each.top], token_ids=[token for token, _ in each.top])
            for each in logprobs
        ],
    )


def encode_load(rank: Rank, load: RankLoad) -> pb.SchedulerLoad:
    """`utilization` is the share of the places in the running batch that are taken."""
    return pb.SchedulerLoad(
        dp_rank=rank,
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=load.used_tokens,
        max_total_num_tokens=load.capacity_tokens,
        token_usage=_share(load.used_tokens, load.capacity_tokens),
        gen_throughput=load.gen_tokens_per_s,
        cache_hit_rate=_share(load.cached_tokens_total, load.prompt_tokens_total),
        utilization=_share(load.running, load.max_running),
        max_running_requests=load.max_running,
        num_waiting_uncached_tokens=load.waiting_uncached_tokens,
        queues=pb.QueueMetrics(waiting=load.waiting),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
