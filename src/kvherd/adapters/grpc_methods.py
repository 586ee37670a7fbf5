"""Which calls a gRPC server has, by reflection: none of them is made."""

from collections.abc import AsyncIterator

import grpc.aio
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvherd.adapters.grpc_channel import open_channel, rpc_errors
from kvherd.adapters.grpc_dialects import DIALECTS
from kvherd.adapters.tls import ClientTls
from kvherd.core.ids import WorkerId

_ENGINES = frozenset(dialect.service for dialect in DIALECTS)


async def engine_methods(target: str, tls: ClientTls | None = None) -> frozenset[str]:
    """The calls of the engine services of `grpc://HOST:PORT`, or over TLS of `grpcs://`.

    Raises a `WorkerError`, also without reflection.
    """
    channel = open_channel(target, tls)
    try:
        return await _methods(channel, WorkerId(target))
    finally:
        await channel.close()


async def _methods(channel: grpc.aio.Channel, worker: WorkerId) -> frozenset[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        for service in _ENGINES:
            yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)

    found: set[str] = set()
    with rpc_errors(worker, "reflection, by which its calls would be found"):
        call = stub.ServerReflectionInfo(ask())
        try:
            async for response in call:
                for data in response.file_descriptor_response.file_descriptor_proto:
                    file = descriptor_pb2.FileDescriptorProto.FromString(data)
                    services = [one for one in file.service if f"{file.package}.{one.name}" in _ENGINES]
                    found.update(method.name for service in services for method in service.method)
        finally:
            call.cancel()
    return frozenset(found)
