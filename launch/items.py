"""Prompts in: JSON lines, Parquet or plain text. A line or row that cannot be used costs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.items import ItemError
from cluster.messages import Item
from cluster.parquet_files import is_parquet, iter_rows

TEXT = (".txt", ".text")
NO_PROMPTS = (".csv", ".tsv", ".xlsx", ".arrow", ".feather", ".gz", ".zst")
"""What people may well give and would be told line by line that it is no JSON."""


class ItemsError(ItemError):
    """A prompts file that cannot be read at all; the message names it and the remedy."""


@dataclass(frozen=True)
class BadItem:
    """A line (Parquet: row) that is no item. ``id`` is free of every item's, so that its error has a line of its own in
    the output."""

    line: int
    id: str
    error: str
    what: str = "line"

    def as_result(self) -> dict[str, Any]:
        """The line of the output file that stands for it."""
        return {"id": self.id, self.what: self.line, "error": f"{self.what} {self.line}: {self.error}"}


Record = tuple[dict[str, Any], str]
"""What a line holds (empty where it holds nothing), and what is wrong with it ("" when nothing is)."""


def iter_items(path: str | Path) -> Iterator[Item | BadItem]:
    """The file's items in order, read line by line; only ids are kept in memory. Blank lines are skipped.

    ``.parquet``: a row an item, nulls left out. ``.txt``: a line a prompt. Everything else: JSON lines.

    An item has an ``id`` (a str; ``line-N`` or ``row-N`` where there is none), a ``prompt`` or ``messages``, and
    whatever else its line has. Of two lines with one id the later is bad.

    Raises ItemsError when the file cannot be read, and for formats that are none of these.
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix in NO_PROMPTS:
        raise ItemsError(f"prompts {file}: {suffix} is not read; give JSON lines (.jsonl), .parquet, or .txt")
    what = "row" if is_parquet(file) else "line"
    taken: dict[str, int] = {}
    try:
        for number, (data, error) in _records(file, suffix):
            yield _checked(data, error or _missing_prompt(data), number, taken, what)
    except OSError as error:
        raise ItemsError(
            f"cannot read prompts {file}: {error.strerror or error}; name a JSONL, Parquet or text file"
        ) from error


def read_items(path: str | Path) -> tuple[list[Item], list[BadItem]]:
    """All items of the file, and its bad lines; see ``iter_items``."""
    items: list[Item] = []
    bad: list[BadItem] = []
    for entry in iter_items(path):
        if isinstance(entry, BadItem):
            bad.append(entry)
        else:
            items.append(entry)
    return items, bad


def _records(file: Path, suffix: str) -> Iterator[tuple[int, Record]]:
    """Line or row number, from 1, and what is there."""
    if is_parquet(file):
        for number, row in enumerate(iter_rows(file), 1):
            yield number, ({key: value for key, value in row.items() if value is not None}, "")
        return
    parse = _parse_text if suffix in TEXT else _parse_json
    with open(file, "rb") as lines:
        for number, raw in enumerate(lines, 1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield number, parse(raw)


def _checked(data: dict[str, Any], error: str, number: int, taken: dict[str, int], what: str) -> Item | BadItem:
    key = data.get("id", f"{what}-{number}")
    if isinstance(key, int) and not isinstance(key, bool):
        key = str(key)
    if not isinstance(key, str) or not key:
        error = error or f"the id is {key!r}; write a non-empty text or a whole number"
        key = f"{what}-{number}"
    if not error and key in taken:
        error = f"the id {key!r} was taken by {what} {taken[key]}; give each {what} an id of its own"
    if error:
        key = _free_id(key, f"{what}-{number}", taken)
    taken[key] = number
    if error:
        return BadItem(number, key, error, what)
    return {**data, "id": key}


def _parse_text(raw: bytes) -> Record:
    try:
        return {"prompt": raw.decode("utf-8").strip("\r\n")}, ""
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8 (byte {error.start})"


def _parse_json(raw: bytes) -> Record:
    try:
        data = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8 (byte {error.start})"
    except json.JSONDecodeError as error:
        return {}, f"not JSON ({error.msg} at column {error.colno})"
    except RecursionError:
        return {}, "not usable JSON (nested too deeply)"
    if not isinstance(data, dict):
        return {}, f"expected an object, found {type(data).__name__}"
    return data, ""


def _missing_prompt(data: dict[str, Any]) -> str:
    if "prompt" in data and "messages" in data:
        return "has both 'prompt' and 'messages'; keep one"
    if "messages" in data:
        return _wrong_messages(data["messages"])
    if "prompt" not in data:
        return "has no 'prompt' and no 'messages'"
    prompt = data["prompt"]
    if not isinstance(prompt, str):
        return f"'prompt' is {type(prompt).__name__}, expected text"
    return "" if prompt.strip() else "'prompt' is empty"


def _wrong_messages(messages: Any) -> str:
    if not isinstance(messages, list) or not messages:
        return "'messages' must be a list of at least one message"
    for position, message in enumerate(messages):
        if not isinstance(message, dict):
            return f"message {position} is {type(message).__name__}, expected an object"
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                return f"message {position} has no text {field!r}"
    return ""


def _free_id(key: str, numbered: str, taken: dict[str, int]) -> str:
    """An id for a bad line: its own where nobody has it, else one made from its number."""
    for candidate in (key, numbered):
        if candidate not in taken:
            return candidate
    suffix = 2
    while f"{numbered}-{suffix}" in taken:
        suffix += 1
    return f"{numbered}-{suffix}"
