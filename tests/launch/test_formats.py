"""Prompts from text and Parquet; answers to Parquet, made from the journal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.items import ItemError
from launch.cli import app
from launch.items import ItemsError, read_items
from launch.run_config import load_run_config
from tests.launch.conftest import Job


def test_a_line_of_text_is_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b'\xef\xbb\xbfName a river.\r\n\n  {"not": "JSON here"}\n\xff\n')
    items, bad = read_items(file)
    assert items == [
        {"id": "line-1", "prompt": "Name a river."},
        {"id": "line-3", "prompt": '  {"not": "JSON here"}'},
    ]
    assert [entry.as_result()["id"] for entry in bad] == ["line-4"] and "not UTF-8" in bad[0].error


@pytest.mark.parametrize("name", ["prompts.csv", "prompts.tsv", "prompts.jsonl.gz"])
def test_a_format_that_is_not_read_is_named_once(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("id,prompt\n")
    with pytest.raises(ItemsError, match=r"is not read; give JSON lines"):
        read_items(tmp_path / name)


def test_answers_to_parquet_have_a_journal_beside_them(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = load_run_config(None, {"model": tmp_path, "prompts": "p.jsonl", "output": tmp_path / "a.parquet"})
    assert config.journal == tmp_path / "a.journal.jsonl"
    assert load_run_config(None, {"model": tmp_path, "prompts": "p", "output": tmp_path / "a.jsonl"}).journal == (
        tmp_path / "a.jsonl"
    )


@pytest.mark.parametrize("which", ["prompts", "output"])
def test_without_pyarrow_one_line_says_how_to_get_it(
    make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "x.parquet").touch()
    job = make_job(**{which: str(tmp_path / "x.parquet")})
    result = CliRunner().invoke(app, ["generate", "--config", str(job.config)])
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert "x.parquet" in result.stderr and "pip install 'flextensor-ray[parquet]'" in result.stderr


def test_parquet_rows_are_items_and_bad_rows_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"id": 7, "prompt": "a", "topic": "x"},
        {"id": 8, "messages": [{"role": "user", "content": "hello"}]},
        {"id": None, "prompt": "b"},
        {"id": 7, "prompt": "again"},
        {"id": 9, "topic": "no prompt"},
    ]
    columns = {name: [row.get(name) for row in rows] for name in ("id", "prompt", "topic", "messages")}
    parquet.write_table(pyarrow.table(columns), tmp_path / "p.parquet")
    items, bad = read_items(tmp_path / "p.parquet")
    assert items == [
        {"id": "7", "prompt": "a", "topic": "x"},
        {"id": "8", "messages": [{"role": "user", "content": "hello"}]},
        {"id": "row-3", "prompt": "b"},
    ]
    assert [entry.as_result()["error"] for entry in bad] == [
        "row 4: the id '7' was taken by row 1; give each row an id of its own",
        "row 5: has no 'prompt' and no 'messages'",
    ]
    (tmp_path / "no.parquet").write_text("hello\n")
    with pytest.raises(ItemError, match=r"no\.parquet cannot be read as Parquet"):
        read_items(tmp_path / "no.parquet")
    with pytest.raises(ItemsError, match="No such file"):
        read_items(tmp_path / "nowhere.parquet")


def test_the_journal_becomes_parquet_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    from cluster.parquet_files import write_answers

    journal, target = tmp_path / "a.journal.jsonl", tmp_path / "a.parquet"
    lines = [
        {"id": "c", "answer": "C", "tokens": [1, 2], "mixed": 1},
        {"id": "a", "answer": "A", "tokens": [], "mixed": "text"},
        {"id": "line-9", "error": "line 9: not JSON"},
        {"id": "b", "error": "too long", "mixed": None},
    ]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert write_answers(journal, target, ["a", "b", "c"]) == 4
    rows = parquet.read_table(target).to_pylist()
    assert [row["id"] for row in rows] == ["a", "b", "c", "line-9"]
    assert [row["error"] for row in rows] == [None, "too long", None, "line 9: not JSON"]
    assert rows[2] == {"id": "c", "answer": "C", "tokens": [1, 2], "mixed": "1", "error": None}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.journal.jsonl", "a.parquet"]
    journal.write_text('{"id": "a", "answer": "half a pair: \\ud83d"}\n')
    write_answers(journal, target, ["a"])
    assert parquet.read_table(target).to_pylist()[0]["answer"] == '"half a pair: \\ud83d"'
    journal.write_text('{"id": "a", "answer": {}}\n')
    with pytest.raises(ItemError, match=r"cannot write .*a\.parquet: .*; the answers are in .*a\.journal\.jsonl"):
        write_answers(journal, target, ["a"])
