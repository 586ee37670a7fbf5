from kvherd.core.fleet.health import Down, HealthJudge, Suspect, Up


def test_one_failure_makes_suspect_and_three_in_a_row_down() -> None:
    judge = HealthJudge()
    assert judge.verdict == Up()
    assert judge.failed("slow") == Suspect("slow")
    assert judge.failed("slow") == Suspect("slow")
    assert judge.failed("gone") == Down("gone")


def test_a_success_between_failures_starts_the_count_anew() -> None:
    judge = HealthJudge()
    judge.failed("slow")
    judge.failed("slow")
    assert judge.succeeded() == Up()
    assert judge.failed("slow") == Suspect("slow")


def test_a_certain_failure_is_enough() -> None:
    assert HealthJudge().failed("connection refused", certain=True) == Down("connection refused")
