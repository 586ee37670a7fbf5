"""vLLM's own bench client, unmodified, against a gateway over the embedded engine.

`make test-vllm` installs and runs it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvherd.testing.herds import EngineProcess
from kvherd.testing.processes import OwnedProcess
from kvherd.testing.stock_clients import engine_with_a_tokenizer, gateway_over
from kvherd.testing.stock_engines import model_directory, stock_python

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

CLIENT_S = 600.0  # most of which it takes to be imported on a machine that is busy
# What `vllm bench serve` runs; the command itself wants the metadata of a package that the CPU build has under another
# name.
COMMAND = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with engine_with_a_tokenizer() as engine:
        yield engine


@pytest.fixture(scope="module", params=["http", "grpc"])
def gateway(request: pytest.FixtureRequest, engine: EngineProcess) -> Iterator[str]:
    with gateway_over(engine, request.param) as url:
        yield url


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_bench_serve_has_every_request_answered(gateway: str, backend: str, endpoint: str, tmp_path: Path) -> None:
    words = (
        *("--backend", backend, "--base-url", gateway, "--endpoint", endpoint, "--model", str(model_directory())),
        *("--dataset-name", "random", "--random-input-len", "40", "--random-output-len", "8", "--num-prompts", "4"),
        *("--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", str(tmp_path)),
        *("--result-filename", "result.json"),
    )
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with OwnedProcess([stock_python("VLLM"), "-c", COMMAND, *words], environment=environment) as client:
        assert client.wait(within_s=CLIENT_S) == 0, client.said
        said = client.said
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (4, 0), said
    assert result["total_output_tokens"] == 32
    assert result["mean_ttft_ms"] > 0
