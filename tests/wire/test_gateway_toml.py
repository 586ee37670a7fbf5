"""The gateway's configuration file, right and wrong."""

import pytest

from kvherd.core.fleet.keyring import KeyLimits
from kvherd.core.fleet.spec import ConfigInvalid, WorkerSpec
from kvherd.core.routing.late import LateBounds
from kvherd.wire.gateway_toml import GatewayFile, KeyEntry, decode_gateway_file

WHOLE = b"""
models = ["llama"]

[[workers]]
url = "http://10.0.0.7:8000"
weight = 2
labels = { zone = "a" }

[[workers]]
url = "grpc://engines:51000"
resolve = true
events = "grpc://{host}:51000"
[workers.labels]
zone = "b"

[aliases]
"gpt-4o" = "llama"

[[keys]]
name = "team-a"
env = "TEAM_A"
in_flight = 8
requests_per_s = 2

[[keys]]
name = "team-b"
file = "/run/secrets/b"
"""


def test_a_whole_file_says_who_serves_what_and_to_whom() -> None:
    engines = WorkerSpec("grpc://engines:51000", "grpc://{host}:51000", labels={"zone": "b"}, resolve=True)
    assert decode_gateway_file(WHOLE, "f") == GatewayFile(
        (WorkerSpec("http://10.0.0.7:8000", labels={"zone": "a"}, weight=2.0), engines),
        {"gpt-4o": "llama"},
        ("llama",),
        (
            KeyEntry("team-a", env="TEAM_A", limits=KeyLimits(8, 2.0)),
            KeyEntry("team-b", file="/run/secrets/b"),
        ),
    )


def test_an_empty_file_says_nothing() -> None:
    assert decode_gateway_file(b"", "f") == GatewayFile()


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ('[[workers]]\nurl = "a', 2, "Unterminated string"),
        ("x = 1", 1, "x: is unknown here; there are workers, aliases, models, keys, late_binding, host_names"),
        (
            '[[workers]]\nurl = "http://a:1"\n\n[[workers]]\nurl = 5',
            5,
            "workers[1].url: must be a string, not a whole number",
        ),
        ('[[workers]]\nurl = "http://a:1"\nevnts = "x"', 3, "evnts: is unknown here; there are url, events"),
        ("# first\n[[workers]]\nweight = 2", 2, "workers[0]: misses url"),
        ('[[workers]]\nurl = "a:1"', 2, "url: 'a:1' is not of the form grpc|grpcs|http|https://HOST:PORT"),
        ('[[workers]]\nurl = "http://a:1"\nweight = 0', 3, "weight: must be above 0"),
        ('[[workers]]\nurl = "http://a:1"\nlabels = {sidecar = "b"}', 3, "labels.sidecar: 'b' is not of the form"),
        ('[[workers]]\nurl = "http://a:1"\nbind = true', 3, "bind: says nothing without events"),
        (
            '[[workers]]\nurl = "http://a:1"\n[[workers]]\nurl = "http://A:1/"',
            4,
            "url: http://a:1 stands here a second time",
        ),
        (
            '[[workers]]\nurl = "http://a:1"\nengine_key_file = "k"\nengine_key_env = "K"',
            4,
            "engine_key_env: stands beside engine_key_file",
        ),
        ('[[workers]]\nurl = "grpc://a:1"\nengine_key_env = "K"', 1, "engine_key: is for engines on HTTP"),
        ('[[workers]]\nurl = "http://a:1"\nengine_key = "K"', 3, "engine_key: is unknown here; there are url"),
        ('[workers]\nurl = "http://a:1"', 1, "workers: must be a list, not a table; each begins with [[workers]]"),
        (
            '[[workers]]\nurl = "http://a:1"\nevents = "grpc://{host}:1"',
            3,
            "events: 'grpc://{host}:1': only {host} may stand there, where each address of a name is a worker",
        ),
        ('[[workers]]\nurl = "http://a:1"\nresolve = true\nevents = "grpc://{hots}:1"', 4, "events: 'grpc://{hots}:1'"),
        ('models = ["m", ""]', 1, "models: a model has a name"),
        ('[[keys]]\nname = "a\\u0000"\nenv = "A"', 2, "name: must be of 1 to 128 printable characters"),
        ('[aliases]\nfast = ""', 2, "aliases: an alias and its model each have a name"),
        ('[aliases]\nfast = "slow"\nslow = "m"', 2, "aliases: 'fast' stands for 'slow', itself an alias"),
        ("[aliases]\nfast = 1", 1, "aliases[...]: must be a string, not a whole number"),
        ('[[keys]]\nname = "a"', 2, "key 'a': give one of file and env, where it is"),
        ('[[keys]]\nname = "a"\nkey = "secret"', 3, "key: is unknown here; there are name, file, env"),
        ('[[keys]]\nname = "a"\nenv = "A"\n[[keys]]\nname = "a"\nenv = "B"', 5, "name: stands here a second time: 'a'"),
        ('[[keys]]\nname = "a"\nenv = "A"\nin_flight = 0', 4, "in_flight: must be 1 or more"),
        ('[[keys]]\nname = "a"\nenv = "A"\nweight = 0', 4, "weight: must be 0.01 to 100"),
        ('models = []\nhost_names = ["a:80"]', 2, "host_names: 'a:80' is not a host's name such as gateway.internal"),
        ("[late_binding]\nbacklog_s = -1", 2, "backlog_s: must be 0 to 3600"),
        ("[late_binding]\nlongest_s = nan", 2, "longest_s: must be 0 to 3600"),
        ("[late_binding]\nageing = 0", 2, "ageing: must be 0.001 to 1000"),
        ("[late_binding]\nbound_s = 1", 2, "bound_s: is unknown here; there are backlog_s, longest_s, ageing"),
        ('[[keys]]\nname = "a"\nenv = "A"\nrequests_per_s = -1', 4, "requests_per_s: must be 0.001 or more"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, line: int, problem: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        decode_gateway_file(text.encode(), "herd.toml")
    assert (refused.value.line, refused.value.problem[: len(problem)]) == (line, problem)
    assert str(refused.value).startswith(f"herd.toml, line {line}: {problem}")


def test_a_file_that_is_nested_without_end_is_refused() -> None:
    with pytest.raises(ConfigInvalid):
        decode_gateway_file(b"models = " + b"[" * 100_000, "f")


def test_a_mark_of_the_encoding_is_passed_over() -> None:
    assert decode_gateway_file(b'\xef\xbb\xbfmodels = ["m"]', "f").models == ("m",)


def test_bytes_that_are_no_text_are_refused_with_their_line() -> None:
    with pytest.raises(ConfigInvalid, match="line 2: is not UTF-8"):
        decode_gateway_file(b"models = []\nx = '\xff'", "f")


def test_what_late_binding_leaves_out_is_as_by_default() -> None:
    assert decode_gateway_file(b"", "herd.toml").late is None
    assert decode_gateway_file(b"[late_binding]\nbacklog_s = 2", "herd.toml").late == LateBounds(backlog_s=2.0)
    assert decode_gateway_file(b"[late_binding]", "herd.toml").late == LateBounds()


def test_a_key_has_the_weight_that_is_told_or_one() -> None:
    text = b'[[keys]]\nname = "a"\nenv = "A"\nweight = 2.5\n[[keys]]\nname = "b"\nenv = "B"'
    assert [key.weight for key in decode_gateway_file(text, "herd.toml").keys] == [2.5, 1.0]
