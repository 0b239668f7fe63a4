"""Two Ray nodes on one machine, each with a /dev/shm and a host name of its own; run in a sandbox by test_two_nodes.

Prints a JSON object a line: ``{"address"}`` once both nodes are up. Each line read from stdin is a command: ``kill``
ends the second node's processes with SIGKILL, ``end`` the cluster.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys

from ray.cluster_utils import Cluster

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
SECOND = "second-node"


def own_machine() -> None:
    """A mount namespace with an empty /dev/shm, and a host name, for this thread and the processes that it starts.

    What started before keeps the old ones; and only the main thread may start a node, since Ray handles signals there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", "/dev/shm"], check=True)
    socket.sethostname(SECOND)


def main() -> None:
    os.environ |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_gpus": 1,
            "num_cpus": 1,
            "node_ip_address": "127.0.0.1",
            "include_dashboard": False,
            "object_store_memory": 80 << 20,
        },
    )
    own_machine()
    second = cluster.add_node(num_gpus=1, num_cpus=1, node_ip_address="127.0.0.1", object_store_memory=80 << 20)
    cluster.wait_for_nodes(timeout=120)
    print(json.dumps({"address": cluster.address}), flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(second, allow_graceful=False)
        elif line.strip() == "end":
            break
    cluster.shutdown()


if __name__ == "__main__":
    main()
