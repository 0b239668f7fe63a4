"""A local Ray as a run starts it, and the coordinator's process on it."""

from __future__ import annotations

import os
import sys

import psutil
import pytest
import ray

from cluster.messages import CoordinatorOptions, JobProgress, ReplanRequest
from cluster.session import make_coordinator

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_a_local_ray_listens_on_loopback_only(local_ray: str) -> None:
    assert local_ray.startswith("127.0.0.1:")
    listening: dict[str, str] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            found = process.net_connections(kind="inet")
        except psutil.Error:  # one that has ended meanwhile
            continue
        listening |= {f"{c.laddr.ip}:{c.laddr.port}": process.name() for c in found if c.status == psutil.CONN_LISTEN}
    assert any("gcs_server" in name for name in listening.values()), listening
    assert {address.rpartition(":")[0] for address in listening} <= LOOPBACK, listening


def nvidia_files(pid: int) -> list[str]:
    """The driver's files that a process has open: with a CUDA context there are some."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:  # it was closed meanwhile
            continue
        if target.startswith("/dev/nvidia"):
            found.append(target)
    return found


@pytest.mark.gpu
def test_where_there_is_a_gpu_the_coordinator_opens_no_file_of_its_driver(local_ray: str) -> None:
    import torch

    torch.zeros(1, device="cuda")
    assert nvidia_files(os.getpid()), "this process has a context: it shows"
    coordinator = make_coordinator(CoordinatorOptions(namespace="no-context", automatic=False))
    try:
        ray.get(coordinator.start.remote(), timeout=120)
        ray.get(coordinator.progress.remote(JobProgress(total=1)), timeout=120)
        ray.get(coordinator.replan.remote(ReplanRequest(dry_run=True)), timeout=120)
        ray.get(coordinator.status.remote(), timeout=120)
        pid = ray.get(coordinator.__ray_call__.remote(lambda actor: os.getpid()), timeout=120)
        assert pid != os.getpid() and nvidia_files(pid) == []
    finally:
        ray.kill(coordinator)


def test_the_coordinators_process_has_no_torch_and_sees_no_gpu(local_ray: str) -> None:
    coordinator = make_coordinator(CoordinatorOptions(namespace="no-torch", automatic=False))
    try:
        outcome = ray.get(coordinator.replan.remote(ReplanRequest(dry_run=True)), timeout=120)
        assert not outcome.committed and outcome.reason
        had = ray.get(
            coordinator.__ray_call__.remote(
                lambda actor: ("torch" in sys.modules, "pynvml" in sys.modules, os.environ["CUDA_VISIBLE_DEVICES"])
            ),
            timeout=120,
        )
        assert had == (False, False, "")
    finally:
        ray.kill(coordinator)
