"""Prompts files: what is an item, and what a bad line costs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.items import BadItem, ItemsError, iter_items, read_items


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_items_keep_their_fields_and_get_an_id_from_their_line(tmp_path: Path) -> None:
    file = write(
        tmp_path / "p", {"prompt": "a", "topic": "x"}, "", {"id": "b", "messages": [message()]}, {"prompt": "c"}
    )
    items, bad = read_items(file)
    assert items == [
        {"id": "line-1", "prompt": "a", "topic": "x"},
        {"id": "b", "messages": [message()]},
        {"id": "line-4", "prompt": "c"},
    ]
    assert bad == []


def message(role: str = "user", content: str = "hello") -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "expected an object, found list"),
        ('"text"', "expected an object, found str"),
        ("{}", "has no 'prompt' and no 'messages'"),
        ('{"promt": "x"}', "has no 'prompt' and no 'messages'"),
        ('{"prompt": 3}', "'prompt' is int"),
        ('{"prompt": "  "}', "'prompt' is empty"),
        ('{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}', "both"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [3]}', "message 0 is int"),
        ('{"messages": [{"role": "user"}]}', "message 0 has no text 'content'"),
        ('{"id": "", "prompt": "x"}', "the id is ''"),
        ('{"id": [1], "prompt": "x"}', "the id is [1]"),
        ('{"id": true, "prompt": "x"}', "the id is True"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_named_by_number_and_costs_no_other(tmp_path: Path, line: str, says: str) -> None:
    items, bad = read_items(write(tmp_path / "p", {"id": "a", "prompt": "a"}, line, {"id": "c", "prompt": "c"}))
    assert [item["id"] for item in items] == ["a", "c"]
    assert len(bad) == 1 and bad[0].line == 2
    assert says in bad[0].error
    assert bad[0].as_result()["id"] == "line-2"
    assert bad[0].as_result()["error"].startswith("line 2: ")


def test_a_bad_line_keeps_an_id_of_its_own(tmp_path: Path) -> None:
    _, bad = read_items(write(tmp_path / "p", {"id": "mine", "question": "x"}))
    assert bad[0].id == "mine"


def test_bytes_that_are_not_utf8_are_one_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n{"prompt": "c"}')
    items, bad = read_items(file)
    assert [item["prompt"] for item in items] == ["a", "c"]
    assert "not UTF-8 (byte 12)" in bad[0].error


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    items, bad = read_items(file)
    assert [item["prompt"] for item in items] == ["a", "b"] and bad == []


def test_the_later_of_two_equal_ids_is_bad_and_whole_numbers_are_ids(tmp_path: Path) -> None:
    items, bad = read_items(write(tmp_path / "p", {"id": 7, "prompt": "a"}, {"id": "7", "prompt": "b"}))
    assert [item["id"] for item in items] == ["7"]
    assert bad[0].id == "line-2" and "'7' was taken by line 1" in bad[0].error


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ItemsError, match=r"cannot read prompts .*nowhere: No such file"):
        read_items(tmp_path / "nowhere")


def test_lines_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    fifo_like = write(tmp_path / "p", *({"prompt": str(n)} for n in range(1000)))
    first = list(itertools.islice(iter_items(fifo_like), 2))
    assert [item["prompt"] for item in first if not isinstance(item, BadItem)] == ["0", "1"]


LINES = st.lists(
    st.one_of(
        st.builds(lambda i: {"id": i, "prompt": "x"}, st.sampled_from(["a", "line-1", "line-2", "line-3-2", 3])),
        st.just({"prompt": "x"}),
        st.builds(lambda i: {"id": i}, st.sampled_from(["a", "line-2"])),
        st.just(3),
    ),
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(lines=LINES)
def test_every_line_has_one_output_id_of_its_own(tmp_path_factory: pytest.TempPathFactory, lines: list[object]) -> None:
    file = write(tmp_path_factory.getbasetemp() / "lines.jsonl", *lines)
    items, bad = read_items(file)
    ids = [item["id"] for item in items] + [entry.id for entry in bad]
    assert len(ids) == len(set(ids)) == len(lines)
