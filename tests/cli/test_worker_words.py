"""A worker in one word of a command line."""

import pytest

from kvherd.cli.worker_words import worker_spec
from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.spec import WorkerSpec


def test_a_word_names_a_worker_and_all_that_is_said_of_it() -> None:
    word = "grpc://a:1,events=tcp://a:2,replay=tcp://a:3,bind=1,sidecar=http://a:9,weight=2,label.zone=b,resolve=1"
    labels = {"zone": "b", "sidecar": "http://a:9"}
    expected = WorkerSpec("grpc://a:1", "tcp://a:2", "tcp://a:3", bind=True, labels=labels, weight=2.0, resolve=True)
    assert worker_spec(word) == expected
    assert worker_spec("http://a:1,engine_key_env=A") == WorkerSpec("http://a:1", engine_key_env="A")
    assert worker_spec("http://a:1,engine_key_file=/run/a") == WorkerSpec("http://a:1", engine_key_file="/run/a")


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("grpc://a:1,evnts=x", "'evnts' is unknown; a worker has events, replay"),
        ("grpc://a:1,events", "is not of the form URL"),
        ("grpc://a:1,bind=yes", "bind is 1 or 0"),
        ("grpc://a:1,weight=fast", "weight is a number, not 'fast'"),
        ("grpc://a:1,tokenizer=/nowhere", "there is no directory /nowhere"),
        ("grpc://a:1,weight=nan", "--worker: 'grpc://a:1': weight: must be above 0"),
        ("http://a:1,events=b", "--worker: 'http://a:1': events: 'b' is not of the form grpc://HOST:PORT"),
        ("http://a:1,events=grpc://{host}:1", r"only \{host\} may stand there"),
        ("banana", "--worker: url: 'banana' is not of the form"),
        ("http://u:secret@a:1,weight=fast", "--worker: 'http://…@a:1': weight is a number"),
        ("grpc://a:1,label.=x,label.=y", "is not of the form URL"),
    ],
)
def test_a_word_that_names_none_is_refused_with_the_reason(word: str, problem: str) -> None:
    with pytest.raises(OptionInvalid, match=problem):
        worker_spec(word)


def test_one_entry_names_a_worker_for_each_address() -> None:
    spec = WorkerSpec("http://herd:8000/v", "grpc://{host}:5", labels={"sidecar": "http://{host}:9"}, resolve=True)
    placed = spec.at("fd00::1")
    assert placed.url == "http://[fd00::1]:8000/v"
    assert placed.events == "grpc://[fd00::1]:5"
    assert placed.labels == {"sidecar": "http://[fd00::1]:9"}
    assert not placed.resolve
