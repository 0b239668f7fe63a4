"""A task of a few small matrices for the tests of the cluster, with items that fail, hang or kill their worker."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flextensor
from cluster.messages import Item
from cluster.task import TaskContext
from flextensor.store import TensorSource
from flextensor.store.filling import Reader
from flextensor.store.layout import StoredTensor


class TinyModel(nn.Module):
    """``units`` square matrices with a non-linearity between them."""

    def __init__(self, units: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def make_model(options: dict[str, Any]) -> TinyModel:
    torch.manual_seed(int(options.get("seed", 0)))
    return TinyModel(int(options.get("units", 6)), int(options.get("width", 128))).requires_grad_(False)


def answer(model: nn.Module, item: Item, steps: int) -> str:
    """A digest of every bit of the last output."""
    generator = torch.Generator().manual_seed(int(hashlib.sha256(str(item["id"]).encode()).hexdigest()[:8], 16))
    x = torch.randn(4, model.blocks[0].in_features, generator=generator)
    with torch.inference_mode():
        for _ in range(steps):
            x = model(x)
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()


def expected(items: Sequence[Item], options: dict[str, Any]) -> dict[str, str]:
    """The answers of the un-offloaded model, by id."""
    model = make_model(options)
    return {str(item["id"]): answer(model, item, int(item.get("steps", 3))) for item in items}


class SlowSource(TensorSource):
    """Waits before it opens each tensor."""

    def __init__(self, tensors: dict[str, torch.Tensor], seconds: float) -> None:
        super().__init__(tensors)
        self._seconds = seconds

    def open(self, tensor: StoredTensor) -> tuple[Reader, bool]:
        time.sleep(self._seconds)
        return super().open(tensor)


class TinyTask:
    """Options: units, width, seed, ``fail_load``: an error to raise, ``fail_load_of``: only in the worker of this name,
    ``fill_seconds``: what filling the store takes for each weight. See ``cluster.task.Task``.

    Items: ``steps`` forwards of ``seconds`` each, which they need no longer once there is a file ``hurry``; ``fail``
    raises; ``kill_once`` and ``hang_once`` name a file that is made before the worker kills itself or hangs, so that
    the second try goes well; ``kill`` kills it each time.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._model: TinyModel | None = None
        self._manager: Any = None

    def load(self, context: TaskContext) -> None:
        if "fail_load" in self._options and self._options.get("fail_load_of") in (None, context.manager_name):
            raise RuntimeError(self._options["fail_load"])
        config = context.config.updated(include_patterns=("blocks.*",), resident_below_bytes=0)
        self._model = make_model(self._options)
        source = None
        if "fill_seconds" in self._options:
            source = SlowSource(dict(self._model.state_dict()), float(self._options["fill_seconds"]))
            self._model = self._model.to("meta")
        flextensor.offload(
            self._model,
            config,
            name=context.manager_name,
            source=source,
            progress=lambda progress: context.progress(str(progress)),
        )
        self._manager = flextensor.get_offload_manager(context.manager_name)

    def warm_up(self, items: Sequence[Item]) -> None:
        assert self._model is not None
        for _ in range(self._manager.iters_before_inference):
            answer(self._model, {"id": "warm-up"}, 1)

    def run(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        return [self._run_one(item) for item in items]

    def _run_one(self, item: Item) -> dict[str, Any]:
        assert self._model is not None
        if item.get("fail"):
            raise RuntimeError(f"item {item['id']} is broken")
        if item.get("kill") or _first_time(item.get("kill_once")):
            os.kill(os.getpid(), signal.SIGKILL)
        if _first_time(item.get("hang_once")):
            time.sleep(3600)
        steps = int(item.get("steps", 3))
        if "seconds" in item:
            for _ in range(steps):
                answer(self._model, item, 1)
                _wait(float(item["seconds"]), item.get("hurry"))
        if item.get("no_json"):
            return {"id": item["id"], "text": object()}
        return {"id": item["id"], "text": answer(self._model, item, steps), "tokens": steps, "pid": os.getpid()}

    def verify(self, items: Sequence[Item], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        want = expected(items, self._options)
        different = [str(result["id"]) for result in results if want[str(result["id"])] != result["text"]]
        return {"checked": len(items), "identical": len(items) - len(different), "different": different}

    def describe(self) -> dict[str, Any]:
        return {"model": "tiny"}


def _wait(seconds: float, hurry: str | None) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not (hurry is not None and Path(hurry).exists()):
        time.sleep(left if hurry is None else min(left, 0.05))


def _first_time(path: str | None) -> bool:
    if path is None or Path(path).exists():
        return False
    Path(path).touch()
    return True
