"""Copies that the loader queues: one by one, and several at once."""

from __future__ import annotations

import pytest
import torch

from flextensor.cudart import batch_of_copies, copies_in_batches, raise_error
from flextensor.runtime.cuda import CudaDevice
from flextensor.runtime.device import Device
from flextensor.runtime.host import HostDevice

RUN = 4096


def open_device(name: str) -> Device:
    return CudaDevice() if name == "cuda" else HostDevice(memory_bytes=1 << 20, link_bytes_per_second=1e9)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("runs", [1, 2, 5])
def test_each_run_arrives_and_nothing_else_is_touched(device: str, runs: int, together: bool) -> None:
    opened = open_device(device)
    source = torch.randint(0, 255, (runs * 2 * RUN,), dtype=torch.uint8)
    if device == "cuda":
        source = source.pin_memory()
    target = opened.allocate(runs * 2 * RUN).fill_(255)
    opened.synchronize()
    pieces = [slice(2 * at * RUN, (2 * at + 1) * RUN) for at in range(runs)]
    stream = opened.new_stream()
    queue = stream.copier([(target[piece], source[piece]) for piece in reversed(pieces)], together=together)
    for _ in range(2):  # it can be called again and again
        queue()
    stream.synchronize()
    expected = torch.full_like(source, 255)
    for piece in pieces:
        expected[piece] = source[piece]
    assert torch.equal(target.cpu(), expected)
    opened.close()


@pytest.mark.gpu
def test_a_batch_that_fails_says_so_and_leaves_no_pending_error() -> None:
    if not copies_in_batches():
        pytest.skip("this CUDA runtime or driver queues no batches")
    stream = CudaDevice().new_stream()
    source = torch.zeros(RUN, dtype=torch.uint8).pin_memory()
    code = batch_of_copies([(0, source.data_ptr(), RUN)] * 2, stream.key)()
    assert code != 0
    with pytest.raises(RuntimeError, match=f"a batch failed with {code}"):
        raise_error("a batch", code)
    assert torch.equal(torch.ones(4, device="cuda").cpu(), torch.ones(4))


@pytest.mark.gpu
def test_copy_streams_are_nobody_elses_and_are_used_again() -> None:
    """torch gives out the same few streams in turn, also for a capture."""
    device = CudaDevice(0)
    ours = [device.new_stream() for _ in range(3)]
    keys = {stream.key for stream in ours}
    theirs = {torch.cuda.Stream(priority=priority).cuda_stream for priority in (0, -1) for _ in range(64)}
    assert len(keys) == 3 and not keys & theirs
    ours.clear()
    assert {device.new_stream().key for _ in range(8)} <= keys
