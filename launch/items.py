"""Prompts in: a JSONL file, one item a line. A line that cannot be used costs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.messages import Item


class ItemsError(ValueError):
    """A prompts file that cannot be read at all; the message names it and the remedy."""


@dataclass(frozen=True)
class BadItem:
    """A line that is no item. ``id`` is free of every item's, so that its error has a line of its own in the output."""

    line: int
    id: str
    error: str

    def as_result(self) -> dict[str, Any]:
        """The line of the output file that stands for it."""
        return {"id": self.id, "line": self.line, "error": f"line {self.line}: {self.error}"}


def iter_items(path: str | Path) -> Iterator[Item | BadItem]:
    """The file's items in order, read line by line; only ids are kept in memory. Blank lines are skipped.

    An item has an ``id`` (a str; ``line-N`` where the line gives none), a ``prompt`` or ``messages``, and whatever
    else its line has. Of two lines with one id the later is bad.

    Raises ItemsError when the file cannot be read.
    """
    taken: dict[str, int] = {}
    try:
        with open(path, "rb") as lines:
            for number, raw in enumerate(lines, 1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                if raw.strip():
                    yield _read_line(raw, number, taken)
    except OSError as error:
        raise ItemsError(f"cannot read prompts {path}: {error.strerror}; name a JSONL file, one item a line") from error


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


def _read_line(raw: bytes, number: int, taken: dict[str, int]) -> Item | BadItem:
    item, error = _parse(raw)
    key = item.get("id", f"line-{number}")
    if isinstance(key, int) and not isinstance(key, bool):
        key = str(key)
    if not isinstance(key, str) or not key:
        error = error or f"the id is {key!r}; write a non-empty text or a whole number"
        key = f"line-{number}"
    if not error and key in taken:
        error = f"the id {key!r} was taken by line {taken[key]}; give each line an id of its own"
    if error:
        key = _free_id(key, number, taken)
    taken[key] = number
    if error:
        return BadItem(line=number, id=key, error=error)
    return {**item, "id": key}


def _parse(raw: bytes) -> tuple[dict[str, Any], str]:
    """The line's object (empty where it has none) and what is wrong with it."""
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
    return data, _missing_prompt(data)


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


def _free_id(key: str, number: int, taken: dict[str, int]) -> str:
    """An id for a bad line: its own where nobody has it, else one made from its number."""
    for candidate in (key, f"line-{number}"):
        if candidate not in taken:
            return candidate
    suffix = 2
    while f"line-{number}-{suffix}" in taken:
        suffix += 1
    return f"line-{number}-{suffix}"
