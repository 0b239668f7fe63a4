"""Files of results: whole under their names, whatever kills the writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.whole_files import whole_file

KILLED = """
import os, signal, sys
from pathlib import Path
from cluster.whole_files import whole_file
with whole_file(Path(sys.argv[1])) as part:
    part.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_the_old_file_and_the_next_writes_over_its_rest(tmp_path: Path) -> None:
    video = tmp_path / "videos" / "a.mp4"
    with whole_file(video) as part:
        part.write_bytes(b"first")
        assert not video.exists() and part.suffix == ".mp4", "encoders go by the suffix"
    assert subprocess.run([sys.executable, "-c", KILLED, str(video)]).returncode == -9
    assert video.read_bytes() == b"first" and len(list(video.parent.iterdir())) == 2
    with whole_file(video) as part:
        part.write_bytes(b"second")
    assert [path.read_bytes() for path in video.parent.iterdir()] == [b"second"]


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), whole_file(tmp_path / "a.png") as part:
        part.write_bytes(b"x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
