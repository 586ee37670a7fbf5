"""Many engines' metrics as one page."""

from kvherd.core.ids import WorkerId
from kvherd.wire.engine_metrics import merge_metrics

ANN, BOB = WorkerId("http://ann:1"), WorkerId("http://bob:1")
PAGE = b"""# HELP x_total How many.
# TYPE x_total counter
x_total{model="m"} 3.0
# HELP wait_seconds How long.
# TYPE wait_seconds histogram
wait_seconds_bucket{le="1.0"} 2.0
wait_seconds_bucket{le="+Inf"} 3.0
wait_seconds_count 3.0
wait_seconds_sum 4.0
"""


def test_every_sample_says_whose_it_is_and_a_family_is_named_once() -> None:
    text = merge_metrics({ANN: PAGE, BOB: PAGE}).decode()
    assert text.count("# TYPE x_total counter") == 1
    assert 'x_total{model="m",worker="http://ann:1"} 3.0' in text
    assert 'x_total{model="m",worker="http://bob:1"} 3.0' in text
    assert 'wait_seconds_bucket{le="1.0",worker="http://bob:1"} 2.0' in text


def test_an_engine_s_own_worker_label_is_kept_under_another_name() -> None:
    text = merge_metrics({ANN: b'up{worker="7"} 1\n'}).decode()
    assert 'exported_worker="7"' in text
    assert 'worker="http://ann:1"' in text


def test_a_page_that_is_none_costs_the_others_nothing() -> None:
    text = merge_metrics({ANN: b"\xff<html>", BOB: PAGE}).decode()
    assert "ann" not in text
    assert 'x_total{model="m",worker="http://bob:1"} 3.0' in text
