"""What engines of others were seen to do instead of what the conformance suite asks for, by the test that says so."""

from collections.abc import Mapping

SGLANG: Mapping[str, str] = {
    # --- generations
    "test_what_it_does_not_do_is_unimplemented_in_words": "Embed is tried, whatever the model",
    "test_a_stream_and_a_whole_answer_have_the_same_tokens": "the end of a stream repeats its last tokens only",
    "test_an_empty_prompt_is_an_invalid_argument_and_costs_the_engine_nothing": "the server dies",
    "test_a_token_that_is_not_in_the_vocabulary_is_an_invalid_argument": "the server dies",
    "test_an_id_that_is_alive_already_exists_and_its_stream_goes_on": "both streams hang",
    "test_an_abort_of_an_id_that_nobody_has_says_so": "it says that it was aborted",
    # --- orders
    "test_a_busy_engine_refuses_a_flush_that_may_not_wait_and_says_what_is_busy": 'it says "failed" and no more',
    "test_a_flush_of_a_busy_engine_exceeds_its_deadline_when_its_time_is_over": "OK, in words that it timed out",
    "test_a_time_that_nobody_can_wait_is_an_invalid_argument": "it flushes",
    "test_a_flush_whose_caller_left_is_withdrawn": "its cache is empty afterwards",
    "test_orders_of_other_kinds_go_on_while_a_flush_waits": "an abort of nobody succeeds",
    "test_a_rank_that_stands_still_costs_an_order_its_time_and_the_next_order_nothing": "it ends when its caller goes",
    "test_a_profile_starts_once_and_stops_once": "the stop fails",
    "test_a_profile_that_a_rank_refuses_is_no_success_and_says_why": "it succeeds",
    "test_a_field_of_a_profile_that_cannot_be_is_an_invalid_argument": "it is ignored",
    "test_a_stream_goes_on_right_after_the_batch_that_it_names": "no stream can be gone on with",
    "test_a_scheduler_that_dies_is_told_to_everybody_at_once": "temporary files are left behind",
    "test_an_engine_that_stops_lets_short_answers_end_and_ends_the_rest": "all calls are cut off at once",
    # --- sidecar
    "test_it_is_one_port_above_grpc": "it has no /health",
    "test_its_metrics_have_the_names_of_sglang_s_boards": "its page is of another content type",
    "test_its_server_information_is_json": "it has none",
    "test_a_method_that_does_not_fit_is_a_405_and_orders_nothing": "a stop of no profile is a 500",
    "test_an_idle_engine_flushes": "it has no /flush_cache",
    "test_a_stop_takes_no_field": "any field is a 500",
    "test_a_second_start_and_a_stop_of_none_are_a_409": "a stop of none is no 409",
    "test_numbers_that_come_as_text_are_taken_as_numbers": "the server dies",
    "test_a_body_in_chunks_is_read": "it is not refused for what it says",
    "test_a_body_of_100_mb_is_a_413": "it is waited for",
    "test_100_mb_in_chunks_are_a_413_before_they_have_come": "they are waited for",
}
