"""CPU that one token message of a gRPC worker costs the gateway, against grpc.aio alone reading the same stream.

    python bench/grpc_tokens.py [--streams 64] [--tokens 200] [--rounds 5]

A fake engine of SGLang's protocol says one token a message on 64 streams, all of them every 25 ms as the steps of an
engine do, in a process of its own. The contenders read it, each in a process of its own and in turns:

alone       the generated stub of grpc.aio, which counts messages
worker      the gateway's adapter: detokenized with the real model's tokenizer, made into OpenAI's event stream,
            written to a client that takes everything
alone_tls   the same two over TLS, each side with a certificate
worker_tls

The text is this project's documentation, each stream at another place of it; as many streams at other places went
before, so that some 7 % of the tokens are new to the reader. CPU is the process's own, of all its threads, from when
every stream has begun to the last message. Beside it stands how long after it was said a message was there. Nothing is
asserted.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import grpc.aio
import uvloop
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub

from kvherd.adapters.grpc_channel import secure_channel
from kvherd.adapters.grpc_worker import GrpcWorker
from kvherd.adapters.model_files import locate
from kvherd.adapters.tls import ClientTls, TlsFiles, TlsOptions
from kvherd.adapters.tokenizer import load_tokenizer
from kvherd.core.ids import RequestId, WorkerId
from kvherd.ports.worker import Call
from kvherd.testing.certificates import Authority
from kvherd.testing.sglang_engine import EOS, Context, EngineScript, ScriptedSglang, serving

OUT = Path(__file__).resolve().parent / "out" / "grpc_tokens.json"
ROOT = Path(__file__).resolve().parent.parent
TEXT = "".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
STEP_S = 0.025
STEP_LIMIT_S = 120.0
_BEGIN = 10  # of a stream's messages: they come while others are still being asked for


class Talker(ScriptedSglang):
    """Says the tokens of a real text, one a message; when, is written down in `place`."""

    def __init__(self, token_ids: Sequence[int], script: EngineScript, place: Path) -> None:
        super().__init__(script)
        self._token_ids = token_ids
        self._place = place

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        wanted, loop = request.sampling_params.max_new_tokens, asyncio.get_running_loop()
        begin = int(request.request_id) * wanted % (len(self._token_ids) - wanted)
        said_s = []
        for made, token_id in enumerate(self._token_ids[begin : begin + wanted], start=1):
            chunk = pb.GenerateStreamChunk(token_ids=[token_id], prompt_tokens=8, completion_tokens=made)
            said_s.append(time.monotonic())
            yield pb.GenerateResponse(request_id=request.request_id, chunk=chunk)
            await asyncio.sleep(STEP_S - loop.time() % STEP_S)
        (self._place / f"{request.request_id}.json").write_text(json.dumps(said_s))
        last = pb.GenerateComplete(finish_reason="length", prompt_tokens=8, completion_tokens=wanted)
        yield pb.GenerateResponse(request_id=request.request_id, complete=last)


class Sink:
    """Implements `ports.worker.Responder`: a client that takes everything at once."""

    def __init__(self, came: Callable[[], None]) -> None:
        self.started = False
        self.events = 0
        self._came = came

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.started = True

    def write(self, data: bytes) -> None:
        self.events += data.count(b"data: ")
        self._came()

    def write_chunk(self, chunk: bytes) -> None:
        self.write(chunk)

    def end(self) -> None:
        return

    def fail(self, reason: str) -> None:
        raise RuntimeError(reason)

    def when_drained(self, then: Callable[[], None]) -> None:
        then()

    async def drain(self) -> None:
        return


async def run_engine() -> None:
    tokenizer = load_tokenizer(locate("smollm2"))
    script = EngineScript(tokenizer_zip=tokenizer.artifact_zip())
    with TemporaryDirectory() as place:
        files = Authority().issue(Path(place), "both")
        pairs, authority = [(files.key.read_bytes(), files.certificate.read_bytes())], files.authority.read_bytes()
        credentials = grpc.ssl_server_credentials(pairs, authority, require_client_auth=True)
        text = TEXT.encode("ascii", "ignore").decode()
        shown = [token_id for token_id in tokenizer.encode(text) if tokenizer.decode([token_id]) and token_id != EOS]
        talker = Talker(shown, script, Path(place))
        async with serving(talker) as plain, serving(talker, credentials=credentials) as secured:
            print(plain, secured, place, flush=True)
            await asyncio.Event().wait()


class Watch:
    """When the messages of each stream came, and what they cost once all streams had begun."""

    def __init__(self, streams: int, tokens: int) -> None:
        self._came_s: list[list[float]] = [[] for _ in range(streams)]
        self._tokens = tokens
        self._to_begin = streams
        self._begun_s = 0.0

    def of(self, number: int) -> Callable[[], None]:
        """To be called with every message of a stream; those from `streams` on only go before."""
        came_s = self._came_s[number] if number < len(self._came_s) else [0.0]

        def came() -> None:
            came_s.append(time.monotonic())
            if len(came_s) == 1:
                self._to_begin -= 1
                if not self._to_begin:
                    self._begun_s = cpu_s()
                    self._before = sum(map(len, self._came_s))

        return came

    async def timed(self, one: Callable[[int], Awaitable[int]], place: str) -> dict[str, Any]:
        streams = len(self._came_s)
        await one(streams)  # the tokenizer is fetched by then
        await asyncio.gather(*map(one, range(streams, 2 * streams)))
        messages = sum(await asyncio.gather(*map(one, range(streams))))
        used_s = cpu_s() - self._begun_s
        return {"us": used_s / (messages - self._before) * 1e6, "messages": messages, **self._late(Path(place))}

    def _late(self, place: Path) -> dict[str, float]:
        late_ms = sorted(
            (came_s - said_s) * 1000
            for number, times in enumerate(self._came_s)
            for came_s, said_s in zip(
                times[_BEGIN:], json.loads((place / f"{number}.json").read_text())[_BEGIN:], strict=False
            )
        )
        assert len(late_ms) == len(self._came_s) * (self._tokens - _BEGIN)
        return {f"p{part}_ms": late_ms[len(late_ms) * part // 100] for part in (50, 99)}


def showing(place: str) -> ClientTls:
    root = Path(place)
    files = TlsFiles(root / "both.pem", root / "both.key", root / "ca.pem")
    return ClientTls(files, TlsOptions("certificate", "key", "authorities"))


async def alone(target: str, place: str, streams: int, tokens: int, tls: ClientTls | None = None) -> dict[str, Any]:
    watch = Watch(streams, tokens)
    async with secure_channel(target, tls, []) if tls else grpc.aio.insecure_channel(target) as channel:
        stub = SglangSchedulerStub(channel)

        async def one(number: int) -> int:
            sampling = pb.SamplingParams(max_new_tokens=tokens)
            asked = pb.GenerateRequest(request_id=str(number), sampling_params=sampling, stream=True)
            came, count = watch.of(number), 0
            async for _ in stub.Generate(asked):
                came()
                count += 1
            return count

        return await watch.timed(one, place)


async def worker(target: str, place: str, streams: int, tokens: int, tls: ClientTls | None = None) -> dict[str, Any]:
    watch = Watch(streams, tokens)
    ann = GrpcWorker(WorkerId(f"grpcs://{target}" if tls else f"grpc://{target}"), tls=tls)
    body = {"model": "herd", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": tokens}

    async def one(number: int) -> int:
        sink, data = Sink(watch.of(number)), json.dumps(body).encode()
        call = Call("POST", "/v1/chat/completions", [], data, RequestId(str(number)), model="herd", stream=True)
        await ann.forward(call, sink)
        return sink.events - 2  # the opening, the end; the finish is a message too

    try:
        return await watch.timed(one, place)
    finally:
        await ann.close()


CONTENDERS = {"alone": alone, "worker": worker, "alone_tls": alone, "worker_tls": worker}


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def read(contender: str, targets: Sequence[str], streams: int, tokens: int) -> None:
    plain, secured, place = targets
    if contender.endswith("_tls"):
        found = await CONTENDERS[contender](secured, place, streams, tokens, showing(place))
    else:
        found = await CONTENDERS[contender](plain, place, streams, tokens)
    print(json.dumps(found))


@contextmanager
def engine() -> Iterator[list[str]]:
    command = [sys.executable, __file__, "--role", "engine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()
        finally:
            process.kill()


def figure(contender: str, targets: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    words = ["--role", contender, "--streams", arguments.streams, "--tokens", arguments.tokens, "--targets", *targets]
    command = [sys.executable, __file__, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_LIMIT_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--role", default="bench", help=argparse.SUPPRESS)
    parser.add_argument("--targets", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if arguments.role == "engine":
        return uvloop.run(run_engine())
    if arguments.role in CONTENDERS:
        return uvloop.run(read(arguments.role, arguments.targets, arguments.streams, arguments.tokens))
    taken: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    late: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    with engine() as targets:
        for _ in range(arguments.rounds):
            for name, times in taken.items():
                found = figure(name, targets, arguments)
                assert found["messages"] == arguments.streams * (arguments.tokens + 1), found
                times.append(found["us"])
                late[name].append((found["p50_ms"], found["p99_ms"]))
    result = {name: {"us_a_message": statistics.median(times)} for name, times in taken.items()}
    for name, found in result.items():
        ratio = statistics.median(own / bare for own, bare in zip(taken[name], taken["alone"], strict=True))
        p50_ms, p99_ms = map(statistics.median, zip(*late[name], strict=True))
        found |= {"to_alone": ratio, "p50_ms": p50_ms, "p99_ms": p99_ms}
        cpu = f"{found['us_a_message']:7.1f} µs of CPU a message  {ratio:5.2f}x"
        print(f"{name:10} {cpu}   there after {p50_ms:5.2f} ms, p99 {p99_ms:5.2f}")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2))
    return None


if __name__ == "__main__":
    main()
