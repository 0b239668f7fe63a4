"""Manual regions: ``offload_block`` marks a part of the forward, and the weights that it reads are a unit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from flextensor.execution import Execution
from flextensor.phases import DISCOVERY
from flextensor.units import OffloadError, Selection, Unit


class Regions:
    """The part of a manager that runs manual regions."""

    phase: str
    units: list[Unit]
    _blocks: dict[str, int]
    _pieces: list[Unit]
    _reads: list[list[int]]
    _execution: Execution
    _selection: Selection

    if TYPE_CHECKING:  # the manager's

        def _enter(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
        def _leave(self, unit: int) -> None: ...
        def _abort(self, unit: int) -> None: ...

    @contextlib.contextmanager
    def block(self, name: str) -> Iterator[None]:
        """A manual region of the forward; see ``flextensor.offload_block``."""
        unit = self._blocks.get(name)
        if unit is None:
            unit = self._new_block(name)
        try:
            self._enter(unit, (), {})
            yield
            self._leave(unit)
        except BaseException:
            self._abort(unit)
            raise

    offload_block = block

    def _new_block(self, name: str) -> int:
        if self.phase != DISCOVERY or not self._selection.loose:
            known = ", ".join(repr(block) for block in self._blocks) or "none"
            why = (
                f"it was not entered during discovery (known regions: {known})"
                if self._selection.loose or self._blocks
                else "the model was offloaded by include_patterns, which leave no weights to regions"
            )
            raise OffloadError(f"offload_block({name!r}): {why}")
        unit = self._blocks[name] = len(self._pieces)
        region = Unit(name, nn.Module(), [])
        self._pieces.append(region)
        self.units.append(region)
        self._reads.append([])
        self._execution.loader.add_unit()
        return unit
