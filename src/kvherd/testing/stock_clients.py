"""The embedded engine under the name of a directory with a tokenizer, as bench clients of others want it, and a gateway
before it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvherd.testing.herds import EngineProcess, begin_engine, begin_gateway
from kvherd.testing.processes import KvherdProcess
from kvherd.testing.stock_engines import model_directory


@contextmanager
def engine_with_a_tokenizer() -> Iterator[EngineProcess]:
    """Its model's name is a directory with a tokenizer, which the clients load by the name that the engine tells."""
    with ExitStack() as stack:
        options = ("--model", "smollm2", "--served-model-name", str(model_directory()))
        yield begin_engine(lambda *words: stack.enter_context(KvherdProcess(*words)), *options)


@contextmanager
def gateway_over(engine: EngineProcess, kind: str) -> Iterator[str]:
    """The URL of a gateway that speaks `http` or `grpc` to the engine."""
    worker = engine.http_worker if kind == "http" else engine.grpc_url
    with ExitStack() as stack:
        yield begin_gateway(lambda *words: stack.enter_context(KvherdProcess(*words)), worker, up=1).url
