"""Items from Python: whatever a program has becomes dicts with an id, checked before anything is started."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle

from cluster.messages import Item


class ItemError(ValueError):
    """An item that a program gave and that cannot be used; the message has its position and the remedy."""


def items_of(values: Iterable[Any]) -> list[Item]:
    """The items of an iterable, in order. A text becomes ``{"prompt": text}``, a mapping a dict of its own, anything
    else ``{"value": it}``; an item that names no ``id`` gets ``item-N``, counted from 1.

    Raises ItemError for an id that is none or taken, and for an item that cannot be sent to a worker.
    """
    found: list[Item] = []
    taken: dict[str, int] = {}
    for number, value in enumerate(values, 1):
        item = _as_item(value)
        key = item.get("id", f"item-{number}")
        if isinstance(key, int) and not isinstance(key, bool):
            key = str(key)
        if not isinstance(key, str) or not key:
            raise ItemError(f"item {number}: the id is {key!r}; use a non-empty text or a whole number")
        if key in taken:
            raise ItemError(f"item {number}: the id {key!r} was taken by item {taken[key]}; give each one of its own")
        taken[key] = number
        _require_sendable(item, number)
        found.append({**item, "id": key})
    return found


def item_length(item: Item) -> int:
    """Characters of an item's text; 0 where it has none."""
    if isinstance(item.get("prompt"), str):
        return len(item["prompt"])
    messages = item.get("messages")
    return sum(len(message["content"]) for message in messages) if isinstance(messages, list) else 0


def tokens_of(result: dict[str, Any]) -> int:
    """New tokens of a result: the length of its ``tokens``, or the number there; 0 where it has none."""
    tokens = result.get("tokens", 0)
    return len(tokens) if isinstance(tokens, list | tuple) else tokens if isinstance(tokens, int) else 0


def _as_item(value: Any) -> Item:
    if isinstance(value, str):
        return {"prompt": value}
    return dict(value) if isinstance(value, Mapping) else {"value": value}


def _require_sendable(item: Item, number: int) -> None:
    try:
        cloudpickle.dumps(item)
    except (TypeError, pickle.PicklingError, AttributeError):
        for key, value in item.items():
            try:
                cloudpickle.dumps(value)
            except Exception as error:
                raise ItemError(
                    f"item {number}: {key!r} ({type(value).__name__}) cannot be sent to a worker: {error}; give plain "
                    "data, such as a path, and open it in the task"
                ) from None
        raise
