"""What each field of a profile does to the traces of kvherd's engine."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvherd.testing.engine_client import EngineClient, fresh_prompt

Event = dict[str, Any]


def profiled(engine: EngineClient, directory: Path, *, tokens: int = 6, **fields: Any) -> list[Path]:
    """Begin a profile, let each rank compute a prompt and an answer, end it if it did not end itself; the traces."""
    answer = engine.post("/start_profile", {"output_dir": str(directory)} | fields)
    assert answer.status_code == 200, answer.text
    for rank in range(engine.address.ranks):
        engine.complete(fresh_prompt(), tokens=tokens, rank=rank)
    ended = engine.post("/stop_profile")
    assert ended.status_code in {200, 409}, ended.text
    traces = sorted(directory.rglob("*.trace.json"))
    assert [path for path in directory.rglob("*") if path.suffix == ".part"] == []
    return traces


def events(trace: Path) -> list[Event]:
    document: list[Event] = json.loads(trace.read_bytes())
    return document


def steps(trace: Path) -> list[Event]:
    return [event for event in events(trace) if event["ph"] == "X" and event["name"].startswith("step ")]


def parts(trace: Path) -> list[Event]:
    return [event for event in events(trace) if event["ph"] == "X" and not event["name"].startswith("step ")]


def test_output_dir_is_made_and_has_a_trace_of_each_rank(traced: EngineClient, tmp_path: Path) -> None:
    traces = profiled(traced, tmp_path / "a" / "b")
    assert [path.parent for path in traces] == [tmp_path / "a" / "b"] * traced.address.ranks
    assert [len(steps(trace)) for trace in traces] == [6] * traced.address.ranks


@pytest.mark.parametrize("wanted", [1, 3])
def test_num_steps_is_exact(traced: EngineClient, tmp_path: Path, wanted: int) -> None:
    assert [len(steps(trace)) for trace in profiled(traced, tmp_path, num_steps=wanted)] == [
        wanted
    ] * traced.address.ranks


def test_start_step_is_the_first_that_is_recorded(traced: EngineClient, tmp_path: Path) -> None:
    past = [steps(trace)[-1]["args"]["step"] for trace in profiled(traced, tmp_path / "past")]
    first = max(past) + 3
    for trace, before in zip(profiled(traced, tmp_path / "new", start_step=first, tokens=12), past, strict=True):
        assert [step["args"]["step"] for step in steps(trace)] == list(range(first, before + 13))


def test_activities_are_parts_of_the_model_or_memory(traced: EngineClient, tmp_path: Path) -> None:
    cpu = profiled(traced, tmp_path / "cpu", activities=["CPU"])[0]
    mem = profiled(traced, tmp_path / "mem", activities=["MEM"])[0]
    assert {"embedding", "attention", "mlp", "logits"} <= {part["name"] for part in parts(cpu)}
    assert parts(mem) == []
    assert "memory" not in {event["name"] for event in events(cpu)}
    assert {"memory", "largest allocations"} <= {event["name"] for event in events(mem)}


def test_a_gpu_that_is_not_there_is_noted_beside_what_can_be_had(traced: EngineClient, tmp_path: Path) -> None:
    answer = traced.post("/start_profile", {"output_dir": str(tmp_path), "activities": ["CPU", "GPU"]})
    traced.post("/stop_profile")
    assert "GPU records nothing" in answer.json()["notes"][0]
    assert traced.post("/start_profile", {"activities": ["GPU"]}).status_code == 400


def test_with_stack_gives_each_part_the_python_stack(traced: EngineClient, tmp_path: Path) -> None:
    for trace in profiled(traced, tmp_path, with_stack=True):
        assert all("transformer.py" in str(part["args"]["stack"]) for part in parts(trace) if part["name"] == "mlp")
        assert any(part["name"] == "mlp" for part in parts(trace))


def test_record_shapes_gives_parts_their_shapes_and_steps_their_rows(traced: EngineClient, tmp_path: Path) -> None:
    for trace in profiled(traced, tmp_path, record_shapes=True):
        assert steps(trace)[0]["args"]["rows"] == [[97, 0]]
        assert all(part["args"]["shape"] for part in parts(trace))


def test_profile_by_stage_splits_the_files_and_counts_steps_in_each(traced: EngineClient, tmp_path: Path) -> None:
    traces = profiled(traced, tmp_path, profile_by_stage=True, num_steps=1)
    assert len(traces) == 2 * traced.address.ranks
    for trace in traces:
        stage = "prefill" if "prefill" in trace.name else "decode"
        assert [step["args"]["phase"] for step in steps(trace)] == [stage]


def test_profile_stages_leaves_the_others_out(traced: EngineClient, tmp_path: Path) -> None:
    for trace in profiled(traced, tmp_path, profile_stages=["decode"]):
        assert {step["args"]["phase"] for step in steps(trace)} == {"decode"}


def test_merge_profiles_makes_one_trace_of_all(traced: EngineClient, tmp_path: Path) -> None:
    traces = profiled(traced, tmp_path, merge_profiles=True)
    [merged] = [path for path in traces if "merged" in path.name]
    assert {step["pid"] for step in steps(merged)} == set(range(traced.address.ranks))
    assert len(steps(merged)) == 6 * traced.address.ranks


def test_profile_prefix_and_profile_id_name_the_files(traced: EngineClient, tmp_path: Path) -> None:
    names = [path.name for path in profiled(traced, tmp_path, profile_prefix="tuesday", profile_id="seven")]
    assert names == [f"tuesday-seven-rank{rank}.trace.json" for rank in range(traced.address.ranks)]


def test_a_profile_has_an_id_of_its_own_if_none_is_given(traced: EngineClient, tmp_path: Path) -> None:
    answer = traced.post("/start_profile", {"output_dir": str(tmp_path)})
    traced.post("/stop_profile")
    assert re.fullmatch(r"profile-[0-9a-f]{32}", answer.json()["profile_id"])


def test_a_trace_has_a_span_a_step_parts_within_it_and_counters(traced: EngineClient, tmp_path: Path) -> None:
    for trace in profiled(traced, tmp_path):
        spans = steps(trace)
        assert [step["args"]["sequences"] for step in spans] == [1] * 6
        assert [step["args"]["new_tokens"] for step in spans] == [97, 1, 1, 1, 1, 1]
        for part in parts(trace):
            assert any(step["ts"] <= part["ts"] and _end(part) <= _end(step) for step in spans)
        assert all(_end(before) <= after["ts"] for before, after in pairwise(spans))
        assert ({step["cat"] for step in spans}, {part["cat"] for part in parts(trace)}) == ({"step"}, {"model"})
        assert {span["tid"] for span in spans + parts(trace)}.isdisjoint({0, *range(traced.address.ranks)})
        counters = {event["name"] for event in events(trace) if event["ph"] == "C"}
        assert {"requests", "cache blocks"} <= counters


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])
