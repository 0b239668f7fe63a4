"""Profiles of made-up models, random and fixed, and a machine of bytes that runs their plans."""

from __future__ import annotations

import random
from collections.abc import Sequence

from flextensor.planner import Plan, align
from flextensor.profile import Profile, StepKind, TensorInfo, TransferCurve, UnitInfo

GIB = 1 << 30

H200 = TransferCurve(
    tuple(
        (size, size / (gb * 1e9))
        for size, gb in ((64 << 10, 1.9), (1 << 20, 35.7), (16 << 20, 44.6), (256 << 20, 55.3), (2 << 30, 54.7))
    )
)
"""The measured link of an H200."""


def make(
    units: Sequence[Sequence[int]],
    *,
    compute: Sequence[float] | None = None,
    visits: Sequence[int] | None = None,
    transfer: TransferCurve | None = None,
    gap: Sequence[float] | None = None,
    host: Sequence[float] | None = None,
) -> Profile:
    """A profile of ``units`` given by their tensors' bytes, side by side in the store."""
    tensors: list[TensorInfo] = []
    infos: list[UnitInfo] = []
    offset = 0
    for u, sizes in enumerate(units):
        first = len(tensors)
        for nbytes in sizes:
            tensors.append(TensorInfo(f"unit{u}.t{len(tensors) - first}", nbytes, offset))
            offset += align(nbytes)
        infos.append(UnitInfo(f"unit{u}", tuple(range(first, len(tensors)))))
    order = tuple(visits if visits is not None else range(len(units)))
    zeros = (0.0,) * len(order)
    kind = StepKind("step", tuple(compute or (1e-3,) * len(order)), tuple(gap or zeros), tuple(host or zeros))
    link = transfer or TransferCurve.from_bandwidth(1e9, 1e-6)
    return Profile(tuple(tensors), tuple(infos), order, (kind,), link)


def random_profile(seed: int, *, most_units: int = 9, most_tensors: int = 4) -> Profile:
    """Unequal sizes, tensors shared between units, units visited twice or never, gaps in the store, several kinds."""
    rng = random.Random(seed)
    tensors: list[TensorInfo] = []
    units: list[UnitInfo] = []
    offset = 0
    for u in range(rng.randint(1, most_units)):
        own: list[int] = []
        for _ in range(rng.randint(1, most_tensors)):
            if tensors and rng.random() < 0.1:
                own.append(rng.randrange(len(tensors)))
                continue
            nbytes = rng.choice([1, 100, 256, 300, 1000, 5000, 100_000, rng.randint(1, 10**6)])
            own.append(len(tensors))
            tensors.append(TensorInfo(f"t{len(tensors)}", nbytes, offset, rng.random() < 0.05, "made so"))
            offset += align(nbytes) + (512 if rng.random() < 0.2 else 0)
        units.append(UnitInfo(f"unit{u}", tuple(dict.fromkeys(own))))
    visits = list(range(len(units)))
    if rng.random() < 0.4:
        visits += [rng.randrange(len(units)) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.3:
        rng.shuffle(visits)
    if rng.random() < 0.1 and len(visits) > 1:
        visits.pop()
    kinds = tuple(
        StepKind(
            f"kind{k}",
            tuple(rng.random() * 1e-4 for _ in visits),
            tuple(rng.random() * 1e-5 * (rng.random() < 0.3) for _ in visits),
            tuple(rng.random() * 3e-5 for _ in visits),
            rng.random() + 0.1,
        )
        for k in range(rng.choice([1, 1, 2]))
    )
    link = TransferCurve.from_bandwidth(rng.choice([1e9, 5e9, 2e10]), rng.choice([1e-6, 1e-5]))
    return Profile(tuple(tensors), tuple(units), tuple(visits), kinds, link)


def h200_model(*, pieces: bool = False, transfer: TransferCurve = H200) -> Profile:
    """24 blocks of 243 M bf16 parameters, 3.6 ms each at 4096 tokens; ``pieces``: each matrix a unit of its own."""
    matrices = {"qkv": 100663296, "o": 33554432, "gate": 117440512, "up": 117440512, "down": 117440512}
    block_bytes = sum(matrices.values())
    tensors: list[TensorInfo] = []
    units: list[UnitInfo] = []
    compute: list[float] = []
    offset = 0
    for block in range(24):
        norms = []
        for name in ("norm1", "norm2"):
            norms.append(len(tensors))
            tensors.append(TensorInfo(f"{block}.{name}", 8192, offset, True, "small"))
            offset += 8192
        own = []
        for name, nbytes in matrices.items():
            own.append(len(tensors))
            tensors.append(TensorInfo(f"{block}.{name}", nbytes, offset))
            offset += nbytes
            if pieces:
                units.append(UnitInfo(f"{block}.{name}", (own[-1], *norms) if name == "qkv" else (own[-1],)))
                compute.append(3.6e-3 * nbytes / block_bytes)
        if not pieces:
            units.append(UnitInfo(f"{block}", (*norms, *own)))
            compute.append(3.6e-3)
    kind = StepKind("prefill", tuple(compute), (0.0,) * len(compute), (20e-6,) * len(compute))
    return Profile(tuple(tensors), tuple(units), tuple(range(len(units))), (kind,), transfer)


class ByteMachine:
    """Runs a plan on real bytes with a link and a compute stream that are late at random.

    Every byte of tensor ``t`` is ``t + 1``. A copy lands byte by byte in two halves, so a reader may find it half done.
    """

    def __init__(self, plan: Plan, profile: Profile, seed: int) -> None:
        self.plan, self.profile, self.rng = plan, profile, random.Random(seed)
        end = max((t.offset + t.nbytes for t in profile.tensors), default=0)
        self.store = bytearray(end)
        for i, t in enumerate(profile.tensors):
            self.store[t.offset : t.offset + t.nbytes] = bytes([i + 1]) * t.nbytes
        self.arena = bytearray(plan.arena_bytes)
        for copy in plan.initial:
            self._land(copy.arena_offset, copy.source_offset, copy.nbytes)

    def _land(self, to: int, source: int, nbytes: int) -> None:
        self.arena[to : to + nbytes] = self.store[source : source + nbytes]

    def run(self, steps: int, patience: float) -> int:
        """Run; the bytes that travelled. patience: how often the compute stream goes on when both could.

        Raises AssertionError when a visit finds other bytes than its own, or nothing can go on.
        """
        count = len(self.plan.visits)
        queue = [
            (s * count + c.visit, (s - c.lag) * count + c.after, c) for s in range(steps) for c in self.plan.copies
        ]
        exited, sent, half, moved = -1, 0, False, 0
        while exited + 1 < steps * count:
            may_copy = sent < len(queue) and queue[sent][1] <= exited
            may_run = sent == len(queue) or queue[sent][0] > exited + 1
            assert may_copy or may_run, f"nothing can go on after visit {exited % count}"
            if may_run and (not may_copy or self.rng.random() < patience):
                exited += 1
                self._read(exited % count)
                continue
            copy = queue[sent][2]
            middle = copy.nbytes // 2
            if not half:
                self._land(copy.arena_offset, copy.source_offset, middle)
            else:
                self._land(copy.arena_offset + middle, copy.source_offset + middle, copy.nbytes - middle)
                moved += copy.nbytes
                sent += 1
            half = not half
        return moved

    def _read(self, visit: int) -> None:
        for t in self.profile.units[self.plan.visits[visit]].tensors:
            if t in self.plan.resident:
                continue
            nbytes, place = self.profile.tensors[t].nbytes, self.plan.offsets[t]
            found = self.arena[place : place + nbytes]
            assert found == bytes([t + 1]) * nbytes, f"visit {visit} finds tensor {found[:1].hex()} in the place of {t}"
