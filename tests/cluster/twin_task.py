"""A task with three models, each with an offload manager of its own, as a pipeline of several networks has them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tiny_task import TinyModel, answer, make_model

import flextensor
from cluster.messages import Item
from cluster.task import TaskContext
from flextensor import registry

OWN_BUDGET = 300_000


class TwinTask:
    """The second model runs after the first one in every item; a small third one has a budget of its own.

    Items: ``late`` runs the fourth model, which has had no step before.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self.models: dict[str, TinyModel] = {}

    def load(self, context: TaskContext) -> None:
        config = context.config.updated(include_patterns=("blocks.*",), resident_below_bytes=0)
        for suffix in ("", "-2", "-text", "-late"):
            model = self.models[suffix] = make_model(self._options)
            own = config.updated(budget_fraction=None, budget_bytes=OWN_BUDGET) if suffix == "-text" else config
            flextensor.offload(model, own, name=context.manager_name + suffix)

    def warm_up(self, items: Sequence[Item]) -> None:
        for suffix in ("", "-2", "-text"):
            for _ in range(6):
                answer(self.models[suffix], {"id": "warm-up"}, 1)

    def run(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        return [self._run_one(item) for item in items]

    def _run_one(self, item: Item) -> dict[str, Any]:
        texts = []
        for suffix in ("-text", "", "-2", *(["-late"] if item.get("late") else [])):
            for _ in range(int(item.get("steps", 6))):
                texts.append(answer(self.models[suffix], item, 1))
                time.sleep(float(item.get("seconds", 0.0)))
        return {"id": item["id"], "text": texts[-1], "same": len(set(texts)) == 1}

    def verify(self, items: Sequence[Item], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"checked": 0, "identical": 0, "different": []}

    def describe(self) -> dict[str, Any]:
        return {"model": "twins"}

    def close(self) -> None:
        for name in registry.names():
            if name.endswith(("-2", "-text", "-late")):
                flextensor.release(name=name)
