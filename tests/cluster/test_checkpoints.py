"""Small files that say how far a long item is: whole, checked, gone when it is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.checkpoints import ItemCheckpoints


def test_what_was_saved_last_is_found_by_another_process_and_by_its_key_only(tmp_path: Path) -> None:
    first = ItemCheckpoints(tmp_path / "kept", 0.0).of("batch 1")
    assert first.due and first.load() is None
    first.save(b"one")
    first.save(b"two")
    again = ItemCheckpoints(tmp_path / "kept", 60.0)
    assert again.of("batch 1").load() == b"two"
    assert again.of("batch 2").load() is None
    assert not again.of("batch 1").due
    again.of("batch 1").remove()
    assert not (tmp_path / "kept").exists(), "the last one takes the folder along"


@pytest.mark.parametrize(
    "spoil", [lambda raw: raw[:-1], lambda raw: raw[:-1] + b"?", lambda raw: b"", lambda raw: b"x"]
)
def test_a_spoilt_file_is_not_used(tmp_path: Path, spoil: object, caplog: pytest.LogCaptureFixture) -> None:
    kept = ItemCheckpoints(tmp_path, 0.0).of("key")
    kept.save(b"tokens")
    (file,) = tmp_path.iterdir()
    file.write_bytes(spoil(file.read_bytes()))  # type: ignore[operator]
    assert kept.load() is None
    assert "no whole checkpoint" in caplog.text


def test_a_place_that_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    kept = ItemCheckpoints(tmp_path / "file" / "kept", 0.0)
    kept.of("a").save(b"x")
    kept.of("b").save(b"x")
    assert len(caplog.records) == 1 and "no checkpoints of long items" in caplog.text
    assert kept.of("a").load() is None
    kept.of("a").remove()


def test_nowhere_keeps_nothing_and_is_never_due() -> None:
    kept = ItemCheckpoints().of("a")
    kept.save(b"x")
    assert kept.load() is None and not kept.due
