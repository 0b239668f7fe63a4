"""What was measured of a model on a device, and of its weights' layout: the planner's only input.

Pure Python: no torch, no device, no clock. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1

RECENT_SAMPLES = 16
"""So many last timed steps of a kind say how it is now: what is planned from, and compared with a prediction."""


class ProfileMismatch(ValueError):
    """A saved profile does not describe this model, dtype or device; the message says what differs."""


@dataclass(frozen=True)
class TensorInfo:
    """One weight in the host store.

    ``offset`` is its byte offset there; tensors whose offsets follow each other (rounded up to 256) can
    travel in one copy. ``keep_resident`` says that it may not be streamed (too small to be worth a copy,
    mutated by the forward, read outside every unit, ...); ``reason`` says why.
    """

    name: str
    nbytes: int
    offset: int
    keep_resident: bool = False
    reason: str = ""


@dataclass(frozen=True)
class UnitInfo:
    """A unit and the indexes (into ``Profile.tensors``) of the weights that one visit of it reads."""

    name: str
    tensors: tuple[int, ...]


@dataclass(frozen=True)
class StepKind:
    """Compute measured for one kind of step (prefill, decode, another batch or resolution).

    All three tuples have one entry a visit, in ``Profile.visits`` order.

    compute: seconds on the device from the visit's start to its end, its weights being there.
    gap: seconds on the compute stream before the visit that belong to no unit (``gap[0]``: also what
        happens between the last visit of a step and the first of the next).
    host: seconds that the host needs to issue the visit; where it exceeds ``compute`` the step is bound by it.
    weight: the share of steps of this kind in the mix that a plan is made for.
    """

    name: str
    compute: tuple[float, ...]
    gap: tuple[float, ...]
    host: tuple[float, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class TransferCurve:
    """Bytes -> seconds of one host-to-device copy, as measured; linear between the points.

    Below the first point the time is the first point's; above the last it grows with the last point's
    bandwidth.
    """

    points: tuple[tuple[int, float], ...]

    def seconds(self, nbytes: int) -> float:
        """Seconds that one copy of ``nbytes`` takes."""
        if nbytes <= 0:
            return 0.0
        sizes = [size for size, _ in self.points]
        at = bisect.bisect_left(sizes, nbytes)
        if at == 0:
            return self.points[0][1]
        if at == len(sizes):
            size, seconds = self.points[-1]
            return seconds * nbytes / size
        (low, low_s), (high, high_s) = self.points[at - 1], self.points[at]
        return low_s + (high_s - low_s) * (nbytes - low) / (high - low)

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the largest copy measured."""
        size, seconds = self.points[-1]
        return size / seconds

    def scaled(self, factor: float) -> TransferCurve:
        """The curve on a link that takes ``factor`` times as long (2.0: half the bandwidth)."""
        return TransferCurve(tuple((size, seconds * factor) for size, seconds in self.points))

    @staticmethod
    def from_bandwidth(bytes_per_second: float, latency: float = 10e-6) -> TransferCurve:
        """An ideal link: ``latency`` seconds a copy plus ``nbytes / bytes_per_second``."""
        sizes = [1 << k for k in range(12, 33, 2)]
        return TransferCurve(tuple((size, latency + size / bytes_per_second) for size in sizes))


@dataclass(frozen=True)
class Profile:
    """Everything that the planner knows.

    visits: the unit index of each visit of one step, in the order in which a step runs them.
    other_bytes: device memory of weights that are managed by no plan (buffers moved as they are).
    activation_bytes: the peak of device memory in a step beyond weights, as measured (0: unknown).
    device: the device's name, part of what must match when a saved profile is loaded.
    """

    tensors: tuple[TensorInfo, ...]
    units: tuple[UnitInfo, ...]
    visits: tuple[int, ...]
    kinds: tuple[StepKind, ...]
    transfer: TransferCurve
    other_bytes: int = 0
    activation_bytes: int = 0
    device: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in self.kinds:
            for column in ("compute", "gap", "host"):
                if len(getattr(kind, column)) != len(self.visits):
                    raise ValueError(
                        f"step kind {kind.name!r} has {len(getattr(kind, column))} values in {column!r}, "
                        f"but a step has {len(self.visits)} visits"
                    )

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights in the host store."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def layout_fingerprint(self) -> str:
        """Identity of the weights' names, sizes and places and of the units: what must match at load."""
        text = json.dumps(
            [[(t.name, t.nbytes, t.offset) for t in self.tensors], [(u.name, u.tensors) for u in self.units]]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def with_kinds(self, kinds: Iterable[StepKind]) -> Profile:
        """The same profile with other step kinds (another mix, newer measurements)."""
        return replace(self, kinds=tuple(kinds))

    def save(self, path: str | Path) -> None:
        """Write as JSON; complete when it appears under its name."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(target.name + ".part")
        beside.write_text(json.dumps({"format": FORMAT_VERSION, **asdict(self)}, indent=1))
        beside.replace(target)

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read what ``save`` wrote.

        Raises ProfileMismatch for a file of another format, with the remedy.
        """
        try:
            data = json.loads(Path(path).read_text())
            if data.pop("format", None) != FORMAT_VERSION:
                raise ProfileMismatch(f"{path}: not a profile of format {FORMAT_VERSION}; profile again")
            return Profile(
                tensors=tuple(TensorInfo(**t) for t in data.pop("tensors")),
                units=tuple(UnitInfo(u["name"], tuple(u["tensors"])) for u in data.pop("units")),
                visits=tuple(data.pop("visits")),
                kinds=tuple(
                    StepKind(
                        name=k["name"],
                        compute=tuple(k["compute"]),
                        gap=tuple(k["gap"]),
                        host=tuple(k["host"]),
                        weight=k["weight"],
                    )
                    for k in data.pop("kinds")
                ),
                transfer=TransferCurve(tuple((p[0], p[1]) for p in data.pop("transfer")["points"])),
                **data,
            )
        except (KeyError, TypeError, IndexError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ProfileMismatch(f"{path}: not a profile ({error}); profile again") from error
