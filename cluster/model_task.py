"""A task made of a program's own functions: one that makes the model, one that runs it on items."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.messages import Item
from cluster.task import Rehearsal, TaskContext, TaskError
from cluster.whole_files import file_stem, whole_file

if TYPE_CHECKING:
    from torch import nn

MakeModel = Callable[[], Any]
RunItems = Callable[[Any, Sequence[Item]], Sequence[Any]]


class ModelTask:
    """See ``cluster.run_batch`` for ``model``, ``run`` and ``compile_fn``; ``files``: where images of results go."""

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        model: MakeModel,
        run: RunItems,
        compile_fn: Callable[[nn.Module], nn.Module] | None = None,
        files: Path | None = None,
    ) -> None:
        self._make, self._run, self._compile_fn, self._files = model, run, compile_fn, files
        self._model: Any = None
        self._copy: Any = None
        self._manager: Any = None

    def load(self, context: TaskContext) -> None:
        """Make the model and offload it."""
        import flextensor

        context.progress("making the model")
        model, source = self._made()
        self._model = flextensor.offload(
            model,
            context.config,
            self._compile_fn,
            name=context.manager_name,
            source=source,
            progress=lambda progress: context.progress(str(progress)),
        )
        self._manager = flextensor.get_offload_manager(context.manager_name)

    def _made(self) -> tuple[Any, Any]:
        """(model, where its weights come from when they are on the meta device)."""
        from torch import nn

        made = self._make()
        model, source = made if isinstance(made, tuple) else (made, None)
        if not isinstance(model, nn.Module):
            raise TaskError(f"the model factory returned {type(model).__name__}; return a torch.nn.Module")
        return model.requires_grad_(False).eval(), source

    def warm_up(self, items: Sequence[Item]) -> None:
        """Run the items until the manager has its first plan.

        Raises TaskError when ``run`` does not call the model.
        """
        for _ in range(self._manager.iters_before_inference):
            if self._manager.phase == "inference":
                return
            before = self._steps()
            self._call(self._model, items)
            if self._steps() == before:
                raise TaskError(
                    "run(model, items) called no unit of the model that it was given; call model(...), and match what "
                    "is called with offload.include_patterns"
                )

    def run(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """What ``run`` returns for the items, each with its id; a mapping as it is, else under ``result``."""
        results = self._call(self._model, items)
        return [self._plain(item, result, self._files) for item, result in zip(items, results, strict=True)]

    def rehearse(self, items: Sequence[Item], *, brief: bool) -> Rehearsal:
        """All of it: how long ``run`` takes is not known. Items are what is counted."""
        before = self._steps()
        self._call(self._model, items)
        return Rehearsal(tokens=len(items), repeats=self._steps() - before)

    def verify(self, items: Sequence[Item], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The same on a whole model, compiled in the same way; equal means every value is, and every image's file."""
        if self._copy is None:
            model, source = self._made()
            if source is not None:
                raise TaskError("verify needs a model with its weights; this factory returns a meta model and a source")
            model.to(self._manager.device.torch_device)
            if self._compile_fn is not None:
                for name, _ in (*self._manager.offload_units(), *self._manager.resident_units()):
                    model.set_submodule(name, self._compile_fn(model.get_submodule(name)))
            self._copy = model
        given = {str(result["id"]): result for result in results}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found = zip(items, self._call(self._copy, items), strict=True)
            again = [_contents(self._plain(item, one, folder), folder) for item, one in found]
        different = [str(one["id"]) for one in again if one != _contents(given[str(one["id"])], self._files)]
        return {"checked": len(again), "identical": len(again) - len(different), "different": different}

    def describe(self) -> dict[str, Any]:
        """The model's class and number of parameters."""
        if self._model is None:
            return {}
        return {
            "class": type(self._model).__name__,
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
        }

    def _steps(self) -> int:
        return sum(self._manager.step_kinds.values())

    def _call(self, model: Any, items: Sequence[Item]) -> Sequence[Any]:
        import torch

        with torch.no_grad():
            results = self._run(model, items)
        if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != len(items):
            found = f"{len(results)} results" if isinstance(results, Sequence) else type(results).__name__
            raise TaskError(f"run(model, items) returned {found} for {len(items)} items; return one an item, in order")
        return results

    def _plain(self, item: Item, result: Any, files: Path | None) -> dict[str, Any]:
        given = dict(result) if isinstance(result, Mapping) else {"result": result}
        return {"id": item["id"], **{key: self._value(item, key, value, files) for key, value in given.items()}}

    def _value(self, item: Item, key: str, value: Any, files: Path | None) -> Any:
        """A tensor or array as numbers, an image as the path of its file in ``files``; in lists and dicts, too."""
        if isinstance(value, Mapping):
            return {name: self._value(item, f"{key}-{name}", inner, files) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(item, f"{key}-{at}", inner, files) for at, inner in enumerate(value)]
        if hasattr(value, "tolist"):
            return value.tolist()
        if hasattr(value, "save") and hasattr(value, "getpixel") and files is not None:
            path = files / f"{file_stem(str(item['id']))}-{file_stem(str(key))}.png"
            with whole_file(path) as part:
                value.save(part, format="PNG")
            return str(path)
        return value


def _contents(result: dict[str, Any], files: Path | None) -> dict[str, Any]:
    """The result with what its files in ``files`` hold in place of their paths."""

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: read(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [read(inner) for inner in value]
        inside = files is not None and isinstance(value, str) and Path(value).parent == files
        return Path(value).read_bytes() if inside else value

    return {key: read(value) for key, value in result.items()}
