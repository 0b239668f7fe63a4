"""From ``offload`` to the first plan: discovery, then profiling, step by step.

While it lasts, every unit is fetched on demand. Discovery watches which weights each unit really reads; profiling
times the visits. What it finds goes into the weights' ``resident_reason`` and the units' reads; at its end it has the
order of visits and the measured step kinds.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from flextensor import measure
from flextensor.config import OffloadConfig
from flextensor.discovery import WarmupTrap
from flextensor.profile import StepKind
from flextensor.runtime.device import Device
from flextensor.units import OffloadError, Unit, Weight

logger = logging.getLogger(__name__)

Milestone = Literal["", "discovered", "profiled"]


class Warmup:
    """``reads``: for each unit the indexes of the weights that it reads, completed here. ``index_of``: id(tensor) ->
    weight index. ``fetch``: a copy of a weight on the device. ``resident``: whether a weight is there for good."""

    def __init__(
        self,
        device: Device,
        config: OffloadConfig,
        weights: Sequence[Weight],
        reads: list[list[int]],
        *,
        index_of: dict[int, int],
        open_units: Sequence[int],
        resident: Callable[[int], bool],
        fetch: Callable[[int], torch.Tensor],
    ) -> None:
        self.recorder = measure.WarmupRecorder(device)
        self.paused = False
        self.activation_bytes = 0
        self.visits: tuple[int, ...] = ()
        self.kinds: tuple[StepKind, ...] = ()
        self.trap: WarmupTrap | None = None
        """Set during the steps of discovery."""
        self._device = device
        self._weights, self._reads = weights, reads
        self._discovery = 0 if config.skip_discovery else config.discovery_iters
        self._all = self._discovery + config.profiling_iters
        self._done = 0
        if self._discovery:
            self.trap = WarmupTrap(
                index_of,
                lambda: open_units[-1] if open_units else None,
                lambda weight, unit: resident(weight) or (unit is not None and weight in reads[unit]),
                fetch,
            )

    def begin_step(self) -> None:
        """A step starts; the device's peak from now on is this step's."""
        self.recorder.begin_step()
        self._device.reset_peak()

    def finish_step(self, weight_bytes: int) -> Milestone:
        """A whole step is over; ``weight_bytes``: what weights take on the device. Says what has ended with it."""
        if self.paused:
            return ""
        self._done += 1
        profiled = self._done > self._discovery
        self.recorder.finish_step(keep=profiled)
        self.activation_bytes = max(self.activation_bytes, self._device.peak_bytes() - weight_bytes)
        if self._done == self._discovery:
            return "discovered"
        return "profiled" if profiled and self._done >= self._all else ""

    def drop_step(self) -> None:
        """The step raised: no sample."""
        self.recorder.finish_step(keep=False)

    def clear(self) -> None:
        """Forget what was profiled; profiling starts anew."""
        self.recorder.steps.clear()
        self._done = min(self._done, self._discovery)

    # ---- what was found

    def end_discovery(self, pieces: Sequence[Unit], blocks: Sequence[int], loose: Sequence[Weight]) -> None:
        """Complete the units' reads; weights that nobody can stream get their reason to stay."""
        trap, self.trap = self.trap, None
        if trap is not None:
            for unit, weights in trap.reads.items():
                if unit is None:
                    self._keep(weights, "read outside every unit")
                else:
                    self._reads[unit] = list(dict.fromkeys([*self._reads[unit], *weights]))
        if loose:
            self._settle_blocks(pieces, blocks)

    def _settle_blocks(self, pieces: Sequence[Unit], blocks: Sequence[int]) -> None:
        """Manual regions own what they were seen to read; loose weights of no region stay resident."""
        if not blocks:
            raise OffloadError(
                "include_patterns is empty and the forward entered no offload_block() region: nothing is offloaded"
            )
        for unit in blocks:
            pieces[unit].weights = [self._weights[at] for at in self._reads[unit]]
        read = {at for row in self._reads for at in row}
        self._keep([at for at in range(len(self._weights)) if at not in read], "read in no region")

    def end_profiling(self) -> bool:
        """Work out visits and kinds; False when no unit ran in any step. The device is idle."""
        steps = [step for step in self.recorder.steps if step.visits]
        if not steps:
            logger.warning("no unit ran during profiling; still fetching on demand")
            return False
        for step in steps:
            for visit in step.visits:
                if visit.nested:
                    self._keep(self._reads[visit.unit], "its visit lies inside another unit's")
        self.visits = Counter(step.units() for step in steps).most_common(1)[0][0]
        sizes = [tuple(self._weights[at].nbytes for at in reads) for reads in self._reads]
        # Units of no weights may be anything.
        alike = [shape or at for at, shape in enumerate(sizes)]
        self.kinds = measure.kinds_from_warmup(steps, self.visits, alike)
        return True

    def _keep(self, weights: Sequence[int] | dict[int, None], reason: str) -> None:
        for at in weights:
            self._weights[at].resident_reason = self._weights[at].resident_reason or reason
