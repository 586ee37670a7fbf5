"""SGLang's engine protocol on gRPC as a client speaks it: core values ↔ messages of `smg-grpc-proto`.

Tokens come in chunks; the last message, `complete`, repeats the tokens of the last chunk if there was one. Engines may
report the token that ended a generation; it is not part of the answer and is left out here. Stop strings are not sent:
whoever holds the text matches them. What the protocol has no field for (seed, cache salt) travels in `custom_params`,
which kvherd's engine reads and others ignore; the seed as text, since numbers there are doubles.
"""

from collections.abc import Collection, Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from kvherd.core.engine.generation import Finish, FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from kvherd.core.errors import FrameInvalid

PROTOCOL = "SGLang scheduler"
_parse = pb.GenerateResponse.FromString


def encode_request(request: GenerationRequest) -> pb.GenerateRequest:
    sampling, limits = request.sampling, request.limits
    message = pb.GenerateRequest(
        request_id=request.request,
        tokenized=pb.TokenizedInput(input_ids=request.prompt_token_ids),
        sampling_params=pb.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            max_new_tokens=limits.max_new_tokens,
            min_new_tokens=limits.min_new_tokens,
            stop_token_ids=limits.stop_token_ids,
            ignore_eos=limits.ignore_eos,
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
            n=1,
            logit_bias={str(token_id): bias for token_id, bias in sampling.logit_bias},
        ),
        return_logprob=sampling.logprobs is not None,
        logprob_start_len=-1,
        top_logprobs_num=sampling.logprobs or 0,
        lora_id=request.lora or "",
        data_parallel_rank=request.rank,
        stream=True,
    )
    extra = {"seed": None if sampling.seed is None else str(sampling.seed), "cache_salt": request.cache_salt}
    present = {name: value for name, value in extra.items() if value is not None}
    if present:
        message.sampling_params.custom_params.update(present)
    return message


class ResponseReader:
    """Turns the responses of one generation into deltas, in order.

    `ending_token_ids` are those that end a generation and do not belong to its answer.
    """

    def __init__(self, ending_token_ids: Collection[int]) -> None:
        self.ending_token_ids = frozenset(ending_token_ids)
        self._completion_tokens = 0
        self._chunks = 0

    def decode(self, data: bytes) -> TokenDelta:
        """Raises `FrameInvalid`."""
        try:
            response = _parse(data)
        except DecodeError as error:
            raise FrameInvalid(PROTOCOL, f"a response that is none: {error}") from None
        return self.read(response)

    def read(self, response: pb.GenerateResponse) -> TokenDelta:
        """Raises `FrameInvalid` for what the protocol does not allow."""
        match response.WhichOneof("response"):
            case "chunk":
                return self._chunk(response.chunk)
            case "complete":
                return self._complete(response.complete)
            case _:
                raise FrameInvalid(PROTOCOL, "a response that is neither chunk nor complete")

    def _chunk(self, chunk: pb.GenerateStreamChunk) -> TokenDelta:
        self._chunks += 1
        self._completion_tokens = chunk.completion_tokens
        token_ids = tuple(chunk.token_ids)
        if chunk.HasField("output_logprobs") or (token_ids and token_ids[-1] in self.ending_token_ids):
            return self._delta(chunk, token_ids, None)
        return TokenDelta(token_ids, chunk.prompt_tokens, self._completion_tokens, chunk.cached_tokens)  # the usual one

    def _complete(self, complete: pb.GenerateComplete) -> TokenDelta:
        token_ids = tuple(complete.output_ids)
        if self._chunks:
            # counted, not compared: what it repeats is all tokens with some engines, the last chunk's with others
            news = complete.completion_tokens - self._completion_tokens
            token_ids = token_ids[-news:] if 0 < news <= len(token_ids) else ()
        try:
            reason = FinishReason(complete.finish_reason)
        except ValueError:
            raise FrameInvalid(PROTOCOL, f"unknown finish reason {complete.finish_reason!r}") from None
        return self._delta(complete, token_ids, Finish(reason, _matched(complete)))

    def _delta(
        self,
        message: pb.GenerateStreamChunk | pb.GenerateComplete,
        token_ids: tuple[int, ...],
        finish: Finish | None,
    ) -> TokenDelta:
        logprobs = _logprobs(message.output_logprobs) if message.HasField("output_logprobs") else ()
        logprobs = logprobs[len(logprobs) - len(token_ids) :] if len(logprobs) >= len(token_ids) else ()
        while token_ids and token_ids[-1] in self.ending_token_ids:
            token_ids, logprobs = token_ids[:-1], logprobs[:-1]
        return TokenDelta(
            token_ids=token_ids,
            prompt_tokens=message.prompt_tokens,
            completion_tokens=message.completion_tokens,
            cached_tokens=message.cached_tokens,
            logprobs=logprobs,
            finish=finish,
        )


def struct_values(message: Struct) -> Mapping[str, Any]:
    """A `Struct` as plain JSON."""
    values: dict[str, Any] = MessageToDict(message)
    return values


def _matched(complete: pb.GenerateComplete) -> int | str | None:
    field = complete.WhichOneof("matched_stop")
    matched: int | str | None = getattr(complete, field) if field else None
    return matched


def _logprobs(message: pb.OutputLogProbs) -> tuple[TokenLogprob, ...]:
    tops = [tuple(zip(top.token_ids, top.values, strict=True)) for top in message.top_logprobs]
    tops += [()] * (len(message.token_ids) - len(tops))
    return tuple(
        TokenLogprob(token_id, logprob, top)
        for token_id, logprob, top in zip(message.token_ids, message.token_logprobs, tops, strict=True)
    )
