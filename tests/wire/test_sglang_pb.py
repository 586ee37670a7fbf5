"""SGLang's messages as a server reads and writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from kvherd.core.engine.generation import Finish, FinishReason, GenerationRequest, Limits, Sampling, TokenLogprob
from kvherd.core.engine.reports import RankLoad
from kvherd.core.errors import FieldInvalid, Unsupported
from kvherd.core.ids import Rank, RequestId
from kvherd.wire.sglang_pb import decode_generate, encode_finish, encode_load, encode_logprobs
from kvherd.wire.worker_pb import encode_request


def _asked(**params: object) -> pb.GenerateRequest:
    message = pb.GenerateRequest(request_id="a", tokenized=pb.TokenizedInput(input_ids=[1, 2]))
    message.sampling_params.CopyFrom(pb.SamplingParams(**params))
    return message


def _one(message: pb.GenerateRequest, *, room: int = 100) -> GenerationRequest:
    [only] = decode_generate(message, room=room)
    return only


def test_zero_is_unset_where_it_makes_no_sense() -> None:
    assert _one(_asked()).sampling == Sampling(temperature=0.0)
    assert _one(_asked(temperature=0.5, top_k=-1)).sampling == Sampling(temperature=0.5)


def test_without_sampling_parameters_it_samples_as_the_model_is() -> None:
    message = pb.GenerateRequest(request_id="a", tokenized=pb.TokenizedInput(input_ids=[1]))
    assert _one(message).sampling == Sampling()


def test_no_limit_is_the_room_there_is() -> None:
    assert _one(_asked(), room=42).limits.max_new_tokens == 42
    assert _one(_asked(max_new_tokens=7), room=42).limits.max_new_tokens == 7
    with pytest.raises(FieldInvalid, match="max_new_tokens"):
        decode_generate(_asked(max_new_tokens=0), room=42)


def test_choices_have_names_and_seeds_of_their_own() -> None:
    message = _asked(n=3, temperature=1.0)
    message.sampling_params.custom_params.update({"seed": "9223372036854775807"})
    choices = decode_generate(message, room=5)
    assert [choice.request for choice in choices] == ["a-0", "a-1", "a-2"]
    assert [choice.sampling.seed for choice in choices] == [2**63 - 1, 0, 1]


@pytest.mark.parametrize("seed", ["x", "1.5", 1.5, "99999999999999999999", True, [1]])
def test_a_seed_that_is_no_whole_number_is_refused(seed: object) -> None:
    message = _asked()
    message.sampling_params.custom_params.update({"seed": seed})
    with pytest.raises(FieldInvalid, match=r"custom_params\.seed"):
        decode_generate(message, room=5)


def test_a_seed_may_be_a_number_too() -> None:
    message = _asked()
    message.sampling_params.custom_params.update({"seed": 11, "cache_salt": "tenant-2"})
    assert _one(message).sampling.seed == 11
    assert _one(message).cache_salt == "tenant-2"


def test_what_is_asked_for_and_empty_is_not_asked_for() -> None:
    message = _asked(regex="")
    message.mm_inputs.SetInParent()
    assert _one(message).request == "a"


@pytest.mark.parametrize(
    "change",
    [
        {"mm_inputs": pb.MultimodalInputs(image_urls=["x"])},
        {"token_ids_logprob": [1]},
        {"input_embeds": [0.5]},
        {"disaggregated_params": pb.DisaggregatedParams()},
    ],
)
def test_what_cannot_be_honoured_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(Unsupported, match=next(iter(change))):
        decode_generate(pb.GenerateRequest(request_id="a", **change), room=5)


_32_BIT = st.floats(0.125, 2.0, width=32)


@given(
    sampling=st.builds(
        Sampling,
        temperature=_32_BIT,
        top_p=st.floats(0.125, 1.0, width=32),
        top_k=st.sampled_from([-1, 1, 40]),
        min_p=st.floats(0.0, 1.0, width=32),
        frequency_penalty=_32_BIT,
        presence_penalty=_32_BIT,
        repetition_penalty=_32_BIT,
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        logprobs=st.none() | st.integers(0, 20),
        logit_bias=st.sampled_from([(), ((3, 1.5), (5, -100.0))]),
    ),
    limits=st.builds(
        Limits,
        max_new_tokens=st.integers(1, 1000),
        min_new_tokens=st.integers(0, 10),
        stop_token_ids=st.sampled_from([(), (4, 9)]),
        ignore_eos=st.booleans(),
    ),
    rank=st.none() | st.integers(0, 3),
    salt=st.none() | st.just("tenant"),
)
def test_what_our_own_gateway_sends_arrives_as_it_was(
    sampling: Sampling, limits: Limits, rank: int | None, salt: str | None
) -> None:
    sent = GenerationRequest(RequestId("a"), [5, 6, 7], limits, sampling, cache_salt=salt, rank=rank)
    assert _one(encode_request(sent)) == sent


def test_an_end_names_what_matched() -> None:
    by_text, by_token, plain = pb.GenerateComplete(), pb.GenerateComplete(), pb.GenerateComplete()
    encode_finish(Finish(FinishReason.STOP, "END"), by_text)
    encode_finish(Finish(FinishReason.STOP, 0), by_token)
    encode_finish(Finish(FinishReason.LENGTH), plain)
    assert (by_text.finish_reason, by_text.matched_stop_str) == ("stop", "END")
    assert by_token.WhichOneof("matched_stop") == "matched_token_id"
    assert (plain.finish_reason, plain.WhichOneof("matched_stop")) == ("length", None)


def test_logprobs_nobody_asked_for_are_absent() -> None:
    assert encode_logprobs(()) is None
    told = encode_logprobs([TokenLogprob(3, -0.5, ((3, -0.5), (4, -1.0)))])
    assert told is not None
    assert (list(told.token_ids), list(told.top_logprobs[0].token_ids)) == ([3], [3, 4])


def test_an_empty_rank_divides_by_nothing() -> None:
    load = encode_load(Rank(2), RankLoad(0, 0, 0, 0, 0, 0, 0))
    assert (load.dp_rank, load.token_usage, load.cache_hit_rate, load.utilization) == (2, 0.0, 0.0, 0.0)
