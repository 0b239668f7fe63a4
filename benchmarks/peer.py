"""GPU to GPU: one actor's resident weights, read by another through a CUDA IPC handle.

    python -m benchmarks.peer                     # two GPUs
    python -m benchmarks.peer --one-gpu           # two processes on one GPU
    python -m benchmarks.peer --tiny              # a small buffer; skips with a reason where there is no CUDA device

Each actor owns one GPU, as the workers of a run do. Measured: seconds to make a handle, to open it (which makes a
context on the owner's GPU when that is another one), to read the weights the first time and after it, and what a reader
sees when the owner is killed. An allocation is the unit of a handle: the owner's resident weights are one here.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import RESULTS, ROOT, environment, environment_lines, write_results

logger = logging.getLogger(__name__)

GIB = 1 << 30
READS = 10
DEATH_SECONDS = 20.0


class PeerActor:
    """One process on one GPU; it owns weights or reads another's. All GPUs are visible: ``index`` names its own."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        torch.ones(1, device=self._device).sum().item()
        self._weights: torch.Tensor | None = None
        self._opened: torch.Tensor | None = None
        self._own: torch.Tensor | None = None

    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def uuid(self) -> str:
        """The GPU's, which tells whether two actors share one."""
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def own(self, nbytes: int) -> float:
        """Take ``nbytes`` of weights with numbers in them; the seconds that making the handle took."""
        self._weights = torch.arange(nbytes // 4, dtype=torch.int32, device=self._device).view(torch.uint8)
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        self._handle = self._weights.untyped_storage()._share_cuda_()
        return time.perf_counter() - began

    def handle(self) -> tuple[Any, ...]:
        """What another process opens the weights with."""
        return tuple(self._handle)

    def open(self, handle: tuple[Any, ...], owner_index: int) -> float:
        """Open the owner's weights; the seconds that it took."""
        began = time.perf_counter()
        storage = torch.UntypedStorage._new_shared_cuda(owner_index, *handle[1:])
        self._opened = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", owner_index)).set_(
            storage, 0, (storage.nbytes(),), (1,)
        )
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - began

    def read(self, repeats: int) -> dict[str, Any]:
        """Copy all of it into memory of our own, on a stream of our own, ``repeats`` times; and compare.

        first_seconds: the first copy, which sets up peer access. seconds: the median of the others.
        """
        assert self._opened is not None
        stream = torch.cuda.Stream(self._device)
        if self._own is None:
            self._own = torch.empty(self._opened.numel(), dtype=torch.uint8, device=self._device)
        took = []
        for _ in range(repeats + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began = time.perf_counter()
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                start.record(stream)
                self._own.copy_(self._opened, non_blocking=True)
                end.record(stream)
            end.synchronize()
            took.append((time.perf_counter() - began, start.elapsed_time(end) / 1e3))
        seconds = statistics.median(event for _, event in took[1:])
        numbers = torch.arange(self._own.numel() // 4, dtype=torch.int32, device=self._device)
        return {
            "first_seconds": took[0][0],
            "seconds": seconds,
            "bytes_per_second": self._own.numel() / seconds,
            "equal": bool(torch.equal(self._own.view(torch.int32), numbers)),
        }


def measure(nbytes: int, *, one_gpu: bool) -> dict[str, Any]:
    """One owner, one reader. Seconds and bytes."""
    import ray

    share = 0.5 if one_gpu else 1.0
    # Peer access needs both GPUs visible in both processes.
    maker = ray.remote(PeerActor).options(
        num_cpus=0, num_gpus=share, runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    )
    owner, reader = maker.remote(0), maker.remote(0 if one_gpu else 1)

    def get(reference: Any) -> Any:
        return ray.get(reference, timeout=90)

    found: dict[str, Any] = {"nbytes": nbytes, "one_gpu": one_gpu}
    handle: tuple[Any, ...] | None = None
    try:
        found["uuids"] = [get(owner.uuid.remote()), get(reader.uuid.remote())]
        if not one_gpu:
            found["peer_access"] = torch.cuda.can_device_access_peer(1, 0)
        found["handle_seconds"] = get(owner.own.remote(nbytes))
        handle = get(owner.handle.remote())
        found["open_seconds"] = get(reader.open.remote(handle, 0))
        found |= get(reader.read.remote(READS))
        found["owner_dies"] = _owner_dies(get(owner.pid.remote()), reader, owner, handle)
    finally:
        for actor in (owner, reader):
            ray.kill(actor)
        if handle is not None:
            # torch counts readers in a file of the owner's, which a killed owner leaves behind.
            counters = handle[4].decode() if isinstance(handle[4], bytes) else str(handle[4])
            Path("/dev/shm", counters.lstrip("/")).unlink(missing_ok=True)
    return found


def _owner_dies(pid: int, reader: Any, owner: Any, handle: tuple[Any, ...]) -> dict[str, Any]:
    """SIGKILL of the owner while the reader has its memory open: does a read work, with which numbers; can it be opened
    again?"""
    import ray

    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + DEATH_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(ray.exceptions.GetTimeoutError):
            try:
                ray.get(owner.pid.remote(), timeout=2)
            except ray.exceptions.RayActorError:
                break
        time.sleep(0.1)
    seen: dict[str, Any] = {}
    for what, call in (("read", lambda: reader.read.remote(1)), ("open_again", lambda: reader.open.remote(handle, 0))):
        try:
            answer = ray.get(call(), timeout=60)
            seen[what] = answer if isinstance(answer, dict) else {"seconds": answer}
        except Exception as error:  # whatever CUDA or Ray says is the finding
            cause = getattr(error, "cause", None) or error
            lines = str(cause).strip().splitlines()
            seen[what] = {"error": f"{type(cause).__name__}: {lines[0] if lines else ''}"}
    return seen


def reason_to_skip(one_gpu: bool) -> str:
    """Why nothing can be measured here; "" when it can."""
    count = torch.cuda.device_count()
    if count == 0:
        return "no CUDA device: a CUDA IPC handle needs one"
    if count < 2 and not one_gpu:
        return f"{count} CUDA device: reading from GPU to GPU needs 2; --one-gpu measures two processes on one"
    return ""


def markdown(data: dict[str, Any]) -> str:
    """The findings as a table."""
    lines = ["# GPU to GPU by CUDA IPC", "", *environment_lines(data["environment"]), ""]
    if data["status"] != "ok":
        return "\n".join([*lines, f"Not measured: {data['status']}.", ""])
    found = data["found"]
    gib = found["nbytes"] / GIB
    dies = found["owner_dies"]
    rows = [
        ("make a handle", f"{found['handle_seconds'] * 1e3:.2f} ms"),
        ("open it", f"{found['open_seconds'] * 1e3:.2f} ms"),
        (f"first read of {gib:g} GiB", f"{found['first_seconds'] * 1e3:.2f} ms"),
        (f"read {gib:g} GiB", f"{found['seconds'] * 1e3:.2f} ms, {found['bytes_per_second'] / 1e9:.1f} GB/s"),
        ("bytes equal", str(found["equal"])),
        ("a read after the owner's SIGKILL", str(dies["read"])),
        ("opening again after it", str(dies["open_again"])),
    ]
    where = "two processes on one GPU" if found["one_gpu"] else "from one GPU to another"
    table = ["| what | measured |", "| --- | --- |", *(f"| {what} | {text} |" for what, text in rows)]
    return "\n".join([*lines, f"Two actors, {where}.", "", *table, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 also when it was skipped."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.peer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--one-gpu", action="store_true", help="both processes on one GPU")
    options.add_argument("--gib", type=float, default=1.0, help="of weights")
    options.add_argument("--output", type=Path, default=RESULTS)
    options.add_argument("--tiny", action="store_true", help="64 MiB")
    given = options.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    status = reason_to_skip(given.one_gpu)
    data: dict[str, Any] = {"benchmark": "peer", "environment": environment(), "status": status or "ok"}
    if status:
        logger.info("skipped: %s", status)
    else:
        import ray

        from cluster.session import start_local

        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        start_local(gpus=torch.cuda.device_count(), namespace="peer")
        try:
            data["found"] = measure((64 << 20) if given.tiny else int(given.gib * GIB), one_gpu=given.one_gpu)
        finally:
            ray.shutdown()
    name = "peer" + ("-tiny" if given.tiny else "") + ("-one-gpu" if given.one_gpu else "")
    write_results(given.output.resolve(), name, data, lambda: markdown(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
