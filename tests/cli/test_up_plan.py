"""What `kvherd up` starts."""

from pathlib import Path

import pytest

from kvherd.cli.logs import LogLevel
from kvherd.cli.up import Herd


def plan(tmp_path: Path) -> Herd:
    return Herd(
        model="tiny",
        gateway_port=8080,
        engine_port=51000,
        policy="kv",
        logs=tmp_path,
        log_level=LogLevel.INFO,
        engine_options=(),
        admin_key=None,
    )


def test_profiles_outlast_the_herd_unless_someone_says_where_they_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVHERD_PROFILE_DIR", "SGLANG_TORCH_PROFILER_DIR"):
        monkeypatch.delenv(name, raising=False)
    for part in plan(tmp_path).parts("/gone/soon"):
        assert part.environment == {"TMPDIR": "/gone/soon", "KVHERD_PROFILE_DIR": str(tmp_path / "profiles")}
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", "/mine")
    for part in plan(tmp_path).parts("/gone/soon"):
        assert part.environment == {"TMPDIR": "/gone/soon"}
