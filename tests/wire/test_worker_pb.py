"""What a client of SGLang's engine protocol reads out of responses."""

import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from kvherd.core.engine.generation import Finish, FinishReason, GenerationRequest, Limits, Sampling, TokenLogprob
from kvherd.core.errors import FrameInvalid
from kvherd.core.ids import RequestId
from kvherd.wire.worker_pb import ResponseReader, encode_request

END = 2


def complete(token_ids: list[int], *, made: int, reason: str = "stop", **more: object) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(output_ids=token_ids, completion_tokens=made, finish_reason=reason, **more)
    )


def chunk(token_ids: list[int], *, made: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=token_ids, completion_tokens=made))


def test_tokens_of_the_complete_that_no_chunk_had_are_read() -> None:
    reader = ResponseReader({END})
    assert reader.read(chunk([5], made=1)).token_ids == (5,)
    assert reader.read(complete([5, 6, 7], made=3)).token_ids == (6, 7)


def test_a_complete_that_counts_more_than_it_has_repeats_nothing() -> None:
    reader = ResponseReader({END})
    reader.read(chunk([5], made=1))
    assert reader.read(complete([], made=2)).token_ids == ()


def test_the_token_that_ended_it_is_no_part_of_the_answer() -> None:
    delta = ResponseReader({END}).read(complete([5, END], made=2, matched_token_id=END))
    assert (delta.token_ids, delta.finish) == ((5,), Finish(FinishReason.STOP, END))


def test_logprobs_stay_with_their_tokens() -> None:
    logprobs = pb.OutputLogProbs(token_logprobs=[-0.5, -1.0], token_ids=[5, END])
    delta = ResponseReader({END}).read(complete([5, END], made=2, output_logprobs=logprobs))
    assert delta.logprobs == (TokenLogprob(5, -0.5),)


@pytest.mark.parametrize("response", [pb.GenerateResponse(), complete([], made=0, reason="bored")])
def test_what_the_protocol_does_not_know_is_refused(response: pb.GenerateResponse) -> None:
    with pytest.raises(FrameInvalid):
        ResponseReader(()).read(response)


def test_a_matched_string_is_told() -> None:
    finish = ResponseReader(()).read(complete([1], made=1, matched_stop_str="x")).finish
    assert finish == Finish(FinishReason.STOP, "x")


def test_nothing_is_custom_unless_asked_for() -> None:
    request = encode_request(GenerationRequest(RequestId("r"), [1], Limits(3), Sampling(), rank=0, lora="l"))
    assert not request.sampling_params.HasField("custom_params")
    assert (request.data_parallel_rank, request.HasField("data_parallel_rank"), request.lora_id) == (0, True, "l")
    assert not request.sampling_params.stop
