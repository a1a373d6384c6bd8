from pathlib import Path

import pytest


@pytest.fixture
def user_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root named in PRORL_GYM_ROOTS, with one resources server folder; the working directory is elsewhere."""
    root = tmp_path / "root"
    (root / "conf" / "environment").mkdir(parents=True)
    (root / "resources_servers" / "mine").mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("PRORL_GYM_ROOTS", str(root))
    return root
