from typing import Any

import msgspec
import pytest

from kvherd.core.errors import OptionInvalid
from kvherd.wire.rank_config import RankConfig, decode_rank_config, encode_rank_config

GOOD: dict[str, Any] = {
    "model": "tiny",
    "ipc_dir": "/tmp/x",
    "events_endpoint": "tcp://127.0.0.1:1",
    "replay_endpoint": "tcp://127.0.0.1:2",
}


def test_what_is_written_is_read_back_from_one_line() -> None:
    config = RankConfig(**GOOD, rank=3, seed=-5)
    line = encode_rank_config(config)
    assert line.count(b"\n") == 1
    assert decode_rank_config(line) == config
    assert (config.orders_endpoint, config.news_endpoint) == ("ipc:///tmp/x/rank3.in", "ipc:///tmp/x/out")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pool_blocks": 0}, "pool_blocks"),
        ({"rank": -1}, "rank"),
        ({"events_endpoint": "udp://x"}, "events_endpoint"),
        ({"chunk_tokens": 8}, "less than the block size 16"),
        ({"what": 1}, "what"),
        ({"ipc_dir": "/" + "d" * 100}, "longer than the 107 bytes"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionInvalid, match=says):
        decode_rank_config(msgspec.json.encode(GOOD | change))


def test_a_line_cut_short_is_refused() -> None:
    with pytest.raises(OptionInvalid):
        decode_rank_config(b"")
