"""vLLM's engine protocol on gRPC as a client speaks it: core values ↔ messages of `smg-grpc-proto`.

Chunks have the tokens since the one before and count these alone; the last message, `complete`, repeats the tokens of
the last chunk. So tokens are counted here. A token's alternatives begin with the token itself, whatever its place among
them. Seeds have 32 bits; the protocol has no field for a cache salt or an adapter.
"""

from collections.abc import Collection, Sequence
from typing import Final

from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from kvherd.core.engine.generation import Finish, FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from kvherd.core.errors import FrameInvalid

PROTOCOL: Final = "vLLM engine"
_SEEDS: Final = 2**31
_MOST_LOGPROBS: Final = 20
"""That vLLM gives unless it is told otherwise."""


def encode_request(request: GenerationRequest) -> pb.GenerateRequest:
    sampling, limits = request.sampling, request.limits
    return pb.GenerateRequest(
        request_id=request.request,
        tokenized=pb.TokenizedInput(input_ids=request.prompt_token_ids),
        sampling_params=pb.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),  # 0 is all there
            min_p=sampling.min_p,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=limits.max_new_tokens,
            min_tokens=limits.min_new_tokens,
            stop_token_ids=limits.stop_token_ids,
            ignore_eos=limits.ignore_eos,
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
            n=1,
            logprobs=_asked(sampling.logprobs),
            seed=None if sampling.seed is None else sampling.seed % _SEEDS,
            logit_bias=dict(sampling.logit_bias),
        ),
        data_parallel_rank=request.rank,
        stream=True,
    )


def _asked(logprobs: int | None) -> int | None:
    """One more than is wanted: the token itself comes first, and may be none of the best."""
    return min(logprobs + 1, max(logprobs, _MOST_LOGPROBS)) if logprobs else logprobs


class VllmReader:
    """Turns the responses of one generation into deltas, in order.

    `ending_token_ids` are those that end a generation and do not belong to its answer.
    """

    def __init__(self, ending_token_ids: Collection[int], *, logprobs: int | None = None) -> None:
        self.ending_token_ids = frozenset(ending_token_ids)
        self._logprobs = logprobs or 0
        self._completion_tokens = 0
        self._chunks = 0

    def decode(self, data: bytes) -> TokenDelta:
        """Raises `FrameInvalid`."""
        try:
            response = pb.GenerateResponse.FromString(data)
        except DecodeError as error:
            raise FrameInvalid(PROTOCOL, f"a response that is none: {error}") from None
        return self.read(response)

    def read(self, response: pb.GenerateResponse) -> TokenDelta:
        """Raises `FrameInvalid` for what the protocol does not allow."""
        match response.WhichOneof("response"):
            case "chunk":
                self._chunks += 1
                return self._delta(response.chunk, tuple(response.chunk.token_ids), None)
            case "complete":
                complete = response.complete
                token_ids = () if self._chunks else tuple(complete.output_ids)
                return self._delta(complete, token_ids, Finish(_reason(complete.finish_reason), _matched(complete)))
            case _:
                raise FrameInvalid(PROTOCOL, "a response that is neither chunk nor complete")

    def _delta(
        self, message: pb.GenerateStreamChunk | pb.GenerateComplete, token_ids: tuple[int, ...], finish: Finish | None
    ) -> TokenDelta:
        self._completion_tokens += len(token_ids)
        logprobs = self._told(message.output_logprobs) if message.HasField("output_logprobs") and token_ids else ()
        logprobs = logprobs if len(logprobs) == len(token_ids) else ()
        while token_ids and token_ids[-1] in self.ending_token_ids:
            token_ids, logprobs = token_ids[:-1], logprobs[:-1]
        return TokenDelta(
            token_ids, message.prompt_tokens, self._completion_tokens, message.cached_tokens, logprobs, finish
        )

    def _told(self, message: pb.OutputLogProbs) -> tuple[TokenLogprob, ...]:
        tops = [self._best(top.token_ids, top.values) for top in message.top_logprobs]
        tops += [()] * (len(message.token_ids) - len(tops))
        if not len(message.token_ids) == len(message.token_logprobs) == len(tops):
            raise FrameInvalid(PROTOCOL, "logprobs that are not as many as their tokens")
        return tuple(map(TokenLogprob, message.token_ids, message.token_logprobs, tops))

    def _best(self, token_ids: Sequence[int], values: Sequence[float]) -> tuple[tuple[int, float], ...]:
        best = sorted(zip(token_ids, values, strict=False), key=lambda one: -one[1])
        return tuple(best[: self._logprobs])


def _reason(word: str) -> FinishReason:
    try:
        return FinishReason(word)
    except ValueError:
        raise FrameInvalid(PROTOCOL, f"unknown finish reason {word!r}") from None


def _matched(complete: pb.GenerateComplete) -> int | str | None:
    field = complete.WhichOneof("matched_stop")
    matched: int | str | None = getattr(complete, field) if field else None
    return matched
