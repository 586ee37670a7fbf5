"""What a client of vLLM's engine protocol writes into requests and reads out of responses."""

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from kvherd.core.engine.generation import Finish, FinishReason, GenerationRequest, Limits, Sampling, TokenLogprob
from kvherd.core.errors import FrameInvalid
from kvherd.core.ids import RequestId
from kvherd.wire.vllm_pb import VllmReader, encode_request

END = 2


def chunk(*token_ids: int, **more: object) -> pb.GenerateResponse:
    """As vLLM has it: it counts its own tokens only."""
    made = pb.GenerateStreamChunk(token_ids=token_ids, completion_tokens=len(token_ids), prompt_tokens=7, **more)
    return pb.GenerateResponse(chunk=made)


def complete(*token_ids: int, reason: str = "stop", **more: object) -> pb.GenerateResponse:
    made = pb.GenerateComplete(
        output_ids=token_ids, completion_tokens=len(token_ids), prompt_tokens=7, finish_reason=reason, **more
    )
    return pb.GenerateResponse(complete=made)


def asked(**sampling: object) -> pb.GenerateRequest:
    request = GenerationRequest(RequestId("r"), [1, 2], Limits(3, 1, (9,)), Sampling(**sampling), rank=1)  # type: ignore[arg-type]
    return encode_request(request)


def test_a_request_says_all_that_was_asked() -> None:
    message = asked(temperature=0.0, top_k=-1, seed=2**40 + 5, logit_bias=((4, -1.5),))
    params = message.sampling_params
    assert (message.request_id, list(message.tokenized.input_ids), message.stream) == ("r", [1, 2], True)
    assert message.data_parallel_rank == 1
    assert params.HasField("temperature")
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 0, 1.0)
    assert (params.max_tokens, params.min_tokens, list(params.stop_token_ids)) == (3, 1, [9])
    assert (params.seed, dict(params.logit_bias)) == (5, {4: -1.5})
    assert not params.HasField("logprobs")


@pytest.mark.parametrize(("wanted", "sent"), [(0, 0), (1, 2), (5, 6), (20, 20), (25, 25)])
def test_one_more_alternative_is_asked_for_than_is_wanted(wanted: int, sent: int) -> None:
    assert asked(logprobs=wanted).sampling_params.logprobs == sent


def test_the_last_message_repeats_the_last_chunk_and_adds_nothing() -> None:
    reader = VllmReader({END})
    deltas = [reader.read(chunk(5)), reader.read(chunk(6, 7)), reader.read(complete(6, 7, reason="length"))]
    assert [delta.token_ids for delta in deltas] == [(5,), (6, 7), ()]
    assert [delta.completion_tokens for delta in deltas] == [1, 3, 3]
    assert deltas[-1].finish == Finish(FinishReason.LENGTH)


def test_an_answer_without_chunks_is_in_its_last_message() -> None:
    delta = VllmReader({END}).read(complete(5, 6, END))
    assert (delta.token_ids, delta.completion_tokens, delta.finish) == ((5, 6), 3, Finish(FinishReason.STOP))


def test_the_token_that_ended_it_is_counted_and_no_part_of_the_answer() -> None:
    reader = VllmReader({END})
    reader.read(chunk(5))
    assert reader.read(chunk(END)).token_ids == ()
    last = reader.read(complete(END, matched_token_id=END))
    assert (last.completion_tokens, last.finish) == (2, Finish(FinishReason.STOP, END))


def test_the_alternatives_are_the_best_whatever_the_token_s_own_place() -> None:
    top = pb.TopLogProbs(token_ids=[8, 3, 4], values=[-4.0, -0.1, -0.2])
    told = pb.OutputLogProbs(token_ids=[8], token_logprobs=[-4.0], top_logprobs=[top])
    (logprob,) = VllmReader({END}, logprobs=2).read(chunk(8, output_logprobs=told)).logprobs
    assert (logprob.token_id, logprob.logprob) == (8, -4.0)
    assert [token for token, _ in logprob.top] == [3, 4]


def test_logprobs_stay_with_their_tokens() -> None:
    told = pb.OutputLogProbs(token_ids=[5, END], token_logprobs=[-0.5, -1.0])
    delta = VllmReader({END}, logprobs=0).read(chunk(5, END, output_logprobs=told))
    assert delta.logprobs == (TokenLogprob(5, -0.5),)


def test_logprobs_that_are_not_as_many_as_their_tokens_are_refused() -> None:
    told = pb.OutputLogProbs(token_ids=[5, 6], token_logprobs=[-0.5])
    with pytest.raises(FrameInvalid, match="logprobs"):
        VllmReader({END}).read(chunk(5, 6, output_logprobs=told))


@pytest.mark.parametrize("response", [pb.GenerateResponse(), complete(reason="error")])
def test_what_the_protocol_does_not_know_is_refused(response: pb.GenerateResponse) -> None:
    with pytest.raises(FrameInvalid):
        VllmReader(()).decode(response.SerializeToString())


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(FrameInvalid, match="none"):
        VllmReader(()).decode(b"\xff\xff")
