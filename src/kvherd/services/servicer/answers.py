"""One choice's deltas as the messages of a Generate stream."""

from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from kvherd.core.engine.generation import TokenDelta, TokenLogprob
from kvherd.core.ids import RequestId
from kvherd.wire.sglang_pb import encode_finish, encode_logprobs


class ChoiceAnswer:
    """Feed it all deltas of one choice: the chunks if the caller streams, and at the end the complete answer.

    A chunk has at least `interval` tokens, but for the last; `interval` None makes no chunks.
    """

    def __init__(self, request: RequestId, index: int, *, interval: int | None) -> None:
        self._request = request
        self._index = index
        self._interval = interval
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._sent_tokens = 0

    def feed(self, delta: TokenDelta) -> list[pb.GenerateResponse]:
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        messages = []
        unsent = len(self._token_ids) - self._sent_tokens
        if self._interval is not None and unsent and (unsent >= self._interval or delta.finish is not None):
            messages.append(pb.GenerateResponse(request_id=self._request, chunk=self._chunk(delta)))
        if delta.finish is not None:
            messages.append(pb.GenerateResponse(request_id=self._request, complete=self._complete(delta)))
        return messages

    def _chunk(self, delta: TokenDelta) -> pb.GenerateStreamChunk:
        begin, self._sent_tokens = self._sent_tokens, len(self._token_ids)
        return pb.GenerateStreamChunk(
            token_ids=self._token_ids[begin:],
            prompt_tokens=delta.prompt_tokens,
            completion_tokens=delta.completion_tokens,
            cached_tokens=delta.cached_tokens,
            output_logprobs=encode_logprobs(self._logprobs[begin:]),
            index=self._index,
        )

    def _complete(self, delta: TokenDelta) -> pb.GenerateComplete:
        complete = pb.GenerateComplete(
            output_ids=self._token_ids,
            prompt_tokens=delta.prompt_tokens,
            completion_tokens=delta.completion_tokens,
            cached_tokens=delta.cached_tokens,
            output_logprobs=encode_logprobs(self._logprobs),
            index=self._index,
        )
        assert delta.finish is not None, "only a last delta completes a choice"
        encode_finish(delta.finish, complete)
        return complete
