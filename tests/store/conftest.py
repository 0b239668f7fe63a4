"""A tmpfs folder of the test's own."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm_dir() -> Iterator[str]:
    """A folder on the machine's tmpfs."""
    folder = tempfile.mkdtemp(prefix="flextensor-tests-", dir="/dev/shm")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[str]:
    """A tmpfs of 64 MiB, as docker gives by default."""
    folder = tmp_path / "shm"
    if not _mount(folder):
        pytest.skip("cannot mount a tmpfs here")
    yield str(folder)
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def tmpfs_of_our_own(tmp_path: Path, shm_dir: str) -> Iterator[str]:
    """A tmpfs that nobody else uses, where one can be mounted; else a folder on the machine's."""
    folder = tmp_path / "shm"
    mounted = _mount(folder)
    yield str(folder) if mounted else shm_dir
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def _mount(folder: Path) -> bool:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture(autouse=True)
def hashes_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of checkpoints are remembered in the test's folder, not in the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
