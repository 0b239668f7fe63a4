"""The loader on a plan written by hand: what the models of the other tests seldom bring about."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from flextensor.planner.plan import HOST, Copy, Plan
from flextensor.runtime.host import HostDevice
from flextensor.runtime.loader import Loader
from flextensor.runtime.memory import DeviceWeights, WeightTable
from flextensor.runtime.timing import Recorder
from flextensor.store import HostStore, UnitSpec, WeightSpec, private_store
from flextensor.units import Weight

NBYTES = 64 << 10


@pytest.fixture
def weights() -> list[Weight]:
    """Four weights of different bytes."""
    return [Weight(f"w{at}", torch.full((NBYTES,), at + 1, dtype=torch.uint8), is_buffer=True) for at in range(4)]


@pytest.fixture
def store(weights: list[Weight]) -> Iterator[HostStore]:
    """The weights as three units: two of one weight, one of two."""
    units = {"a": weights[:1], "b": weights[1:2], "c": weights[2:]}
    specs = [UnitSpec(name, tuple(WeightSpec.of(w.name, w.tensor) for w in own)) for name, own in units.items()]
    made = private_store(specs, {w.name: w.tensor for w in weights})
    yield made
    made.close()


Visit = Callable[..., None]


@pytest.fixture
def device() -> Iterator[HostDevice]:
    """A device on a link so slow that a copy takes 30 ms."""
    made = HostDevice(memory_bytes=1 << 20, link_bytes_per_second=2e6)
    yield made
    made.close()


@pytest.fixture
def loader(weights: list[Weight], store: HostStore, device: HostDevice) -> Iterator[Loader]:
    """Weights 0 and 2 share one slot, 1 and 3 another. Units 0 and 1 read one weight each; unit 2, the last visit,
    reads 2, copied after the first visit, and 3, copied after the second. Unit 3 reads 2 alone and has no visit."""
    stream = device.new_stream()
    memory = DeviceWeights(WeightTable(weights, store), device, stream)
    offsets = {0: 0, 1: NBYTES, 2: 0, 3: NBYTES}

    def copy(tensor: int, visit: int, after: int, lag: int) -> Copy:
        source = store.layout.by_name[weights[tensor].name].offset
        return Copy(visit, HOST, source, offsets[tensor], NBYTES, (tensor,), after, lag)

    copies = (copy(0, 0, 2, 1), copy(1, 1, 2, 1), copy(2, 2, 0, 0), copy(3, 2, 1, 0))
    plan = Plan((0, 1, 2), frozenset(), offsets, 2 * NBYTES, copies, 0, 2 * NBYTES, 4 * NBYTES)
    memory.apply(plan)
    made = Loader(plan, [[0], [1], [2, 3], [2]], memory, stream, Recorder(device, every=0))
    made.start()
    yield made
    made.close()
    memory.clear()


@pytest.fixture
def visit(loader: Loader, weights: list[Weight]) -> Visit:
    """Runs one visit of a unit and looks at the bytes of what it reads."""

    def run(unit: int, *reads: int) -> None:
        loader.enter(unit)
        for tensor in reads:
            assert bool((weights[tensor].tensor == tensor + 1).all()), f"unit {unit} read other bytes than {tensor}'s"
        loader.exit(unit)

    return run


def step(loader: Loader, visit: Visit) -> None:
    """One step in the plan's order."""
    loader.begin_step("")
    visit(0, 0)
    visit(1, 1)
    visit(2, 2, 3)


def test_a_unit_nobody_foresaw_waits_for_the_copies_of_a_visit_that_has_only_some(loader: Loader, visit: Visit) -> None:
    for _ in range(2):
        step(loader, visit)
    assert loader.counters.unforeseen == 0
    loader.begin_step("")
    visit(0, 0)
    visit(3, 2)
    visit(1, 1)
    visit(2, 2, 3)


@pytest.mark.parametrize("inside_a_unit", [True, False])
def test_steps_go_on_after_a_capture_that_was_broken_off(
    loader: Loader, visit: Visit, device: HostDevice, monkeypatch: pytest.MonkeyPatch, inside_a_unit: bool
) -> None:
    """The host device records no graphs; that one is recorded is all that the loader is told."""
    step(loader, visit)
    with monkeypatch.context() as patch:
        patch.setattr(device, "is_capturing", lambda: True)
        loader.begin_step("")
        visit(0, 0)
        if inside_a_unit:
            loader.enter(1)
            loader.abort(1)
    before = loader.counters.copied_bytes
    for _ in range(3):
        step(loader, visit)
    assert loader.counters.copied_bytes >= before + 3 * 4 * NBYTES
