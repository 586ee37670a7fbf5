from kvherd.core.kv.lag import Lag


def test_a_lag_is_the_last_one_and_the_worst_of_a_minute() -> None:
    lag = Lag()
    assert (lag.last_s, lag.worst_s(0.0), lag.least_s(0.0)) == (None, None, None)
    for lag_s, now_s in ((0.5, 0.0), (0.002, 1.0), (0.004, 30.0)):
        lag.seen(lag_s, now_s)
    assert (lag.last_s, lag.worst_s(31.0), lag.least_s(31.0)) == (0.004, 0.5, 0.002)
    assert (lag.last_s, lag.worst_s(61.0), lag.least_s(61.0)) == (0.004, 0.004, 0.004)
    assert (lag.last_s, lag.worst_s(120.0)) == (0.004, None)


def test_what_a_minute_of_batches_keeps_is_bounded() -> None:
    lag = Lag()
    for number in range(10_000):
        lag.seen(1.0 / (number + 1), number * 0.1)
    assert lag.worst_s(999.9) == 1.0 / 9401
    assert lag.least_s(999.9) == 1.0 / 10_000
