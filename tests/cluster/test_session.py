"""A local Ray as a run starts it."""

from __future__ import annotations

import psutil
import pytest

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
