"""`kvherd bridge` as a process: killed, restarted, stopped, and started wrongly."""

import asyncio
import signal
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from kvherd.core.ids import EngineHash
from kvherd.core.kv.events import BlocksStored
from kvherd.testing.herds import Start
from kvherd.testing.processes import free_ports
from kvherd.testing.publisher import FakePublisher

pytestmark = pytest.mark.engine
START_S = 20.0


async def snapshot(port: int, publisher: FakePublisher) -> tuple[str, list[int]]:
    """The epoch and the blocks of a bridge that is up and has read what was published."""
    wanted = len(publisher.life)
    async with asyncio.timeout(START_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = VllmEngineStub(channel).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), wait_for_ready=True)
        epoch = dict(await call.initial_metadata())["kvherd-epoch"]
        blocks: list[int] = []
        while len(blocks) < wanted:
            message = await call.read()
            blocks += [one.block_hash for event in message.events for one in event.stored.blocks]
        call.cancel()
        return str(epoch), blocks


async def test_a_killed_bridge_comes_back_with_everything_and_a_stopped_one_leaves_nothing(
    start: Start, tmp_path: Path
) -> None:
    port = free_ports((0,))
    async with FakePublisher(events_endpoint=f"ipc://{tmp_path}/e", replay_endpoint=f"ipc://{tmp_path}/r") as publisher:
        words = ("bridge", "--engine", "http://127.0.0.1:1", "--listen", f"127.0.0.1:{port}")
        sockets = ("--events", publisher.events_endpoint, "--replay", publisher.replay_endpoint)
        await publisher.publish(BlocksStored((EngineHash(1),), None, (1, 1), 2))
        first = start(*words, *sockets)
        before = await snapshot(port, publisher)
        first.signal(signal.SIGKILL)
        await asyncio.to_thread(first.wait, within_s=5)
        await publisher.publish(BlocksStored((EngineHash(2),), None, (2, 1), 2))
        second = start(*words, *sockets)
        after = await snapshot(port, publisher)
        assert (before[1], sorted(after[1])) == ([1], [1, 2])
        assert before[0] != after[0]
        assert "the engine does not say what it is yet" in second.said
        async with asyncio.timeout(START_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = VllmEngineStub(channel).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
            await call.initial_metadata()
            second.signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError, match="the bridge is stopping") as ended:
                async for _ in call:
                    pass
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(second.wait, within_s=5) == 0
        assert "Traceback" not in second.said
        second.assert_nothing_left(ports=[port])


async def test_metrics_and_health_are_on_loopback_where_they_were_asked_for_and_gone_with_the_bridge(
    start: Start, tmp_path: Path
) -> None:
    port = free_ports((0, 1, 2))
    async with FakePublisher(events_endpoint=f"ipc://{tmp_path}/e", replay_endpoint=f"ipc://{tmp_path}/r") as publisher:
        words = ("bridge", "--engine", "http://127.0.0.1:1", "--listen", f"127.0.0.1:{port}", "--stall-s", "5")
        sockets = ("--events", publisher.events_endpoint, "--replay", publisher.replay_endpoint)
        await publisher.publish(BlocksStored((EngineHash(1),), None, (1, 1), 2))
        bridge = start(*words, *sockets, "--metrics-port", str(port + 1))
        await snapshot(port, publisher)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port + 1}", timeout=20) as client:
            assert 'kvherd_bridge_blocks{rank="0"} 1.0' in (await client.get("/metrics")).text
            health = (await client.get("/health")).json()
        assert [one["blocks"] for one in health["ranks"]] == [1]
        assert health["engine"]["up"] is not True
        second = start("bridge", "--listen", f"127.0.0.1:{port + 2}", "--metrics-port", str(port + 1))
        assert await asyncio.to_thread(second.wait, within_s=START_S) == 1
        assert f"port {port + 1} is in use" in second.said
        assert "--metrics-port" in second.said
        bridge.signal(signal.SIGTERM)
        assert await asyncio.to_thread(bridge.wait, within_s=10) == 0
        assert "Traceback" not in bridge.said
        bridge.assert_nothing_left(ports=[port, port + 1])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--engine", "grpc://127.0.0.1"), "kvherd: --engine: 'grpc://127.0.0.1' must be grpc://HOST:PORT"),
        (("--engine", "grpc://h:99999"), "kvherd: --engine: 'grpc://h:99999': 99999 is no port"),
        (("--engine", "ftp://h:1"), "kvherd: --engine: 'ftp://h:1': it must begin with http:// or https://"),
        (("--engine", "grpc://h:1", "--replay", "ipc:///r"), "kvherd: --replay: name the engine's --events too"),
        (("--engine", "grpc://h:1", "--tokenizer", "/"), "kvherd: --tokenizer: an engine on gRPC hands out its own"),
        (("--events", "tcp://*:5557"), "kvherd: --events: 'tcp://*:5557' is where an engine listens"),
        (("--listen", "50061"), "kvherd: --listen: '50061' must be HOST:PORT"),
        (("--ranks", "2", "--replay", "tcp://127.0.0.1:5558"), "kvherd: --replay: tcp://127.0.0.1:5558 is an endpoint"),
    ],
    ids=["no port", "such port", "scheme", "replay alone", "tokenizer", "events", "listen", "overlap"],
)
def test_a_wrong_option_is_one_line(start: Start, words: tuple[str, ...], line: str) -> None:
    process = start("bridge", *words)
    assert process.wait(within_s=START_S) == 2
    assert process.said.startswith(line)
    assert len(process.said.splitlines()) == 1
