"""A bridge that serves over TLS, and a gateway's follower of it, through renewals on both sides and a restart."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvherd.adapters.grpc_kv_feed import GrpcKvFeed
from kvherd.adapters.grpc_worker import GrpcWorker
from kvherd.adapters.tls import HTTP_2, ClientTls, FileServerTls, TlsFiles, TlsOptions
from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.core.errors import WorkerUnreachable
from kvherd.core.ids import EngineHash, Rank, WorkerId
from kvherd.core.kv.events import BlocksStored
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.kv.stream import StreamBroken
from kvherd.services.bridge.bridge import Bridge, BridgeConfig
from kvherd.services.bridge.flushes import Flushes
from kvherd.services.bridge.http_front import HttpFront
from kvherd.services.gateway.following.follow import Followers, FollowOptions
from kvherd.services.kv_relay.event_streams import EventStreams
from kvherd.services.kv_relay.relay import KvRelay, RelayOptions
from kvherd.services.tls.certificates import CertificateWatch
from kvherd.services.tls.handshakes import Handshakes
from kvherd.testing.certificates import DAY, Authority, IssuedFiles
from kvherd.testing.patience import until
from kvherd.testing.processes import free_ports
from kvherd.testing.publisher import FakePublisher
from kvherd.testing.workers import FakeWorker

pytestmark = pytest.mark.net

OPTIONS = TlsOptions("--cert", "--key", "--ca")
PATIENCE_S = 30.0
ANN = WorkerId("http://ann:1")
ANN0 = Holder(ANN, Rank(0))
QUICK = FollowOptions(grace_s=0.3, first_pause_s=0.01, most_pause_s=0.05, long_pause_s=0.1)


def block(number: int) -> BlocksStored:
    return BlocksStored((EngineHash(number),), None, (number, 1, 1), 3)


@dataclass
class Site:
    """One bridge with TLS before one publisher; `serving` starts it, again and again."""

    root: Path
    authority: Authority
    publisher: FakePublisher
    relay: KvRelay
    files: IssuedFiles
    port: int
    handshakes: Handshakes = field(default_factory=Handshakes)
    """Of the bridge that was started last."""

    def client(self, name: str = "gateway") -> ClientTls:
        mine = self.authority.issue(self.root, name)
        return ClientTls(TlsFiles(mine.certificate, mine.key, mine.authority), OPTIONS)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[tuple[FileServerTls, EventStreams]]:
        tls = FileServerTls(TlsFiles(self.files.certificate, self.files.key, self.files.authority), OPTIONS)
        streams = EventStreams(self.relay, server="the bridge")
        worker = FakeWorker(ANN)
        flushes = Flushes(worker, obeyed=self.relay.flushed, unknown=self.relay.doubted)
        front = HttpFront(worker, streams, flushes)
        watch = CertificateWatch(own=tls, workers=None, period_s=0.02, whose="this bridge's")
        bridge = Bridge(BridgeConfig(port=self.port, drain_s=0.1), front, identify=worker.detect, tls=tls)
        async with flushes, watch, bridge:
            self.handshakes = bridge.handshakes
            yield tls, streams


@asynccontextmanager
async def site(root: Path) -> AsyncIterator[Site]:
    authority = Authority()
    files = authority.issue(root, "bridge")
    async with FakePublisher() as publisher:
        feed = ZmqFrameFeed(publisher.events_endpoint, publisher.replay_endpoint)
        async with KvRelay({Rank(0): feed}, options=RelayOptions(probe_s=0.05, replay_silence_s=0.3)) as relay:
            yield Site(root, authority, publisher, relay, files, free_ports((0,)))


async def test_a_follower_over_tls_keeps_its_index_through_renewals_and_a_restart(tmp_path: Path) -> None:
    """1. The follower reads over TLS, with a certificate of its own. 2. The bridge's certificate is renewed: its stream
    lives on, and the next connection is shown the new one. 3. The follower's is renewed too. 4. The bridge stops, and
    comes back: the follower subscribes anew, by the new certificates, and what was told meanwhile is known.
    """
    index = PrefixIndex(PrefixHasher(b"k"))
    async with site(tmp_path) as at, Followers(index, options=QUICK) as followers:
        client = at.client()

        async def holds(*numbers: int) -> None:
            await until(
                lambda: followers.credit(ANN) and set(index.contents(ANN0)) == set(numbers), within_s=PATIENCE_S
            )

        async with at.serving() as (tls, streams):
            followers.add(ANN, GrpcKvFeed(f"127.0.0.1:{at.port}", tls=client), model="m")
            await at.publisher.publish(block(1), block(2))
            await holds(1, 2)
            before_s = tls.expires_at_s
            at.authority.issue(tmp_path, "bridge", ends=20 * DAY)
            await until(lambda: tls.expires_at_s > before_s, within_s=PATIENCE_S)
            assert await shown_until(at.port, client) == tls.expires_at_s
            await at.publisher.publish(block(3))
            await holds(1, 2, 3)
            assert streams.counts["accepted"] == 1, "the stream lived on"
            at.authority.issue(tmp_path, "gateway", ends=20 * DAY)
            assert client.refresh()
        await at.publisher.publish(block(4))
        async with at.serving() as (_, streams):
            await holds(1, 2, 3, 4)
            assert streams.counts["accepted"] == 1


async def shown_until(port: int, client: ClientTls) -> float:
    """When the certificate expires that a new connection is shown."""
    async with asyncio.timeout(PATIENCE_S):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client.context(HTTP_2))
        told = writer.get_extra_info("ssl_object").getpeercert()
        writer.transport.abort()
    return float(ssl.cert_time_to_seconds(told["notAfter"]))


async def test_who_shows_no_certificate_of_the_right_authority_hears_nothing(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    async with site(tmp_path) as at, at.serving() as (_, streams):
        stranger = Authority("another").issue(other, "stranger")
        for files in (
            TlsFiles(authorities=at.files.authority),
            TlsFiles(stranger.certificate, stranger.key, at.files.authority),
        ):
            feed = GrpcKvFeed(f"127.0.0.1:{at.port}", tls=ClientTls(files, OPTIONS))
            with pytest.raises(StreamBroken):
                async with asyncio.timeout(PATIENCE_S), aclosing(feed.subscribe({}, None)) as items:
                    await anext(items)
        assert at.handshakes.begun >= 2, "those that fail are begun, too"
        plain = GrpcKvFeed(f"127.0.0.1:{at.port}")
        with pytest.raises(StreamBroken):
            async with asyncio.timeout(PATIENCE_S), aclosing(plain.subscribe({}, None)) as items:
                await anext(items)
        assert streams.counts["accepted"] == 0


async def test_a_gateway_asks_a_bridge_over_tls_as_a_worker(tmp_path: Path) -> None:
    async with site(tmp_path) as at, at.serving():
        url = WorkerId(f"grpcs://127.0.0.1:{at.port}")
        trusted = GrpcWorker(url, tls=at.client())
        strange = GrpcWorker(url, tls=ClientTls(TlsFiles(authorities=at.files.authority), OPTIONS))
        try:
            await trusted.probe()
            with pytest.raises(WorkerUnreachable):
                await strange.probe()
        finally:
            await trusted.close()
            await strange.close()
