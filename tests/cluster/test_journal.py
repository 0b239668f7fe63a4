"""The answers file: whole lines, none twice, resumed wherever the writer died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.journal import JournalError, OutputJournal


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_second_answer_to_an_id_is_not_written(tmp_path: Path) -> None:
    journal = OutputJournal(tmp_path / "out" / "answers.jsonl")
    assert len(journal.write([{"id": "a", "text": "1"}, {"id": "a", "text": "2"}])) == 1
    assert journal.write([{"id": "a", "text": "3"}]) == []
    journal.close()
    assert lines_of(tmp_path / "out" / "answers.jsonl") == [{"id": "a", "text": "1"}]


def test_a_file_cut_at_any_byte_resumes_to_the_same_answers(tmp_path: Path) -> None:
    answers = [{"id": str(k), "text": "é" * k + "\n"} for k in range(4)]
    whole = tmp_path / "whole.jsonl"
    journal = OutputJournal(whole)
    journal.write(answers)
    journal.close()
    content = whole.read_bytes()
    for cut in range(len(content) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(content[:cut])
        journal = OutputJournal(path)
        assert len(journal.finished) == content[:cut].count(b"\n")
        journal.write(answers)
        journal.close()
        assert sorted(line["id"] for line in lines_of(path)) == ["0", "1", "2", "3"]
        assert lines_of(path) == answers


def test_overwrite_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"id": "old"}\n')
    journal = OutputJournal(path, overwrite=True)
    journal.write([{"id": "new"}])
    journal.close()
    assert lines_of(path) == [{"id": "new"}]


def test_a_strange_line_in_the_middle_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text('{"id": "a"}\nmy notes\n{"id": "b"}\n')
    before = path.read_bytes()
    with pytest.raises(JournalError, match="line 2"):
        OutputJournal(path)
    assert path.read_bytes() == before


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    journal = OutputJournal(tmp_path / "answers.jsonl")
    with pytest.raises(JournalError, match="another run"):
        OutputJournal(tmp_path / "answers.jsonl")
    journal.close()
    OutputJournal(tmp_path / "answers.jsonl").close()


def test_items_that_failed_count_as_finished_and_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"id": "a", "error": "broken"}\n{"id": 7}\n')
    journal = OutputJournal(path)
    assert journal.finished == {"a", "7"} and journal.failed == {"a"}
    journal.close()


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=str(tmp_path)):
        OutputJournal(tmp_path)


def test_half_a_surrogate_pair_is_kept_as_an_escape(tmp_path: Path) -> None:
    """JSON and file names can hold one; UTF-8 cannot."""
    path = tmp_path / "answers.jsonl"
    journal = OutputJournal(path)
    journal.write([{"id": "a\ud83d", "answer": "\u00fc"}, {"id": "b", "answer": "\u00fc"}])
    journal.close()
    assert path.read_bytes().splitlines()[1] == '{"id": "b", "answer": "\u00fc"}'.encode()
    again = OutputJournal(path)
    assert again.finished == {"a\ud83d", "b"}
    again.close()
