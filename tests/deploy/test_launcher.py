"""Ray's cluster launcher with the shipped YAML, over a real sshd on loopback."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.jobs import TOTAL_BYTES, deployment, wait_for, write_job
from tests.deploy.sandbox import ROOT, Sandbox, beyond_loopback, missing_for

pytestmark = deployment()

PORT = 2222

SSHD = """
Port {port}
ListenAddress 127.0.0.1
HostKey {ssh}/host
PidFile {ssh}/sshd.pid
AuthorizedKeysFile {ssh}/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
MaxStartups 100:30:200
MaxSessions 100
SetEnv {environment}
"""

# The launcher's YAML has no field for sshd's port.
PROXY = """
import os, socket, sys, threading

link = socket.create_connection((sys.argv[1], int(sys.argv[2])))

def up():
    while piece := os.read(0, 65536):
        link.sendall(piece)
    link.shutdown(socket.SHUT_WR)

threading.Thread(target=up, daemon=True).start()
while piece := link.recv(65536):
    while piece:
        piece = piece[os.write(1, piece):]
"""


@pytest.fixture
def cluster_yaml(sandbox: Sandbox) -> Iterator[Path]:
    """The shipped YAML with a name, a key and a port of the test's own; sshd is up."""
    if reason := missing_for("sshd", "ssh", "ssh-keygen", "rsync"):
        pytest.skip(reason)
    ssh = sandbox.folder / "ssh"
    ssh.mkdir(mode=0o700)
    for name in ("host", "key"):
        sandbox.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / name))
    shutil.copy(ssh / "key.pub", ssh / "authorized_keys")
    # ssh's own home is the one in passwd; what Ray and its commands write goes to $HOME.
    carried = ("HOME", "TMPDIR", "RAY_TMPDIR", "XDG_RUNTIME_DIR", "RAY_USAGE_STATS_ENABLED")
    environment = " ".join(f"{name}={sandbox.environment[name]}" for name in carried)
    (ssh / "sshd_config").write_text(SSHD.format(port=PORT, ssh=ssh, environment=environment))
    (ssh / "proxy.py").write_text(PROXY)
    (sandbox.home / ".bashrc").write_text(
        f"export PATH={sandbox.environment['PATH']} PYTHONPATH={sandbox.environment['PYTHONPATH']}\n"
        "export FLEXTENSOR_RAY_OPTIONS='--num-gpus=2 --num-cpus=2 --include-dashboard=false'\n"
    )
    sandbox.run("/usr/sbin/sshd", "-f", str(ssh / "sshd_config"), "-E", str(ssh / "sshd.log"))
    data = yaml.safe_load((ROOT / "launch" / "cluster.yaml").read_text())
    data["cluster_name"] = f"flextensor-{uuid.uuid4().hex[:8]}"
    data["auth"] |= {
        "ssh_private_key": str(ssh / "key"),
        "ssh_proxy_command": f"{sys.executable} {ssh}/proxy.py 127.0.0.1 {PORT}",
    }
    path = sandbox.folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(data))
    yield path
    sockets = hashlib.sha256(data["cluster_name"].encode()).hexdigest()  # Ray's own choice, outside of TMPDIR
    for folder in Path("/tmp").glob("ray_ssh_*/*"):
        if sockets.startswith(folder.name):
            shutil.rmtree(folder)


def test_up_submit_replan_while_it_runs_and_down(sandbox: Sandbox, cluster_yaml: Path) -> None:
    job = write_job(sandbox.folder, "launched")
    quick = {"AUTOSCALER_NODE_START_WAIT_S": "60"}
    cluster = ("--no-config-cache", str(cluster_yaml))
    sandbox.start_ray("ray", "up", "-y", "--disable-usage-stats", *cluster, **quick)
    assert (sandbox.home / ".ray" / "auth_token").stat().st_size > 0

    submitted = sandbox.start(
        "ray", "submit", *cluster, str(ROOT / "launch" / "generate.py"), "--", "--config", str(job.config)
    )
    wait_for("both workers at work", lambda: len(job.pids) == 2 or submitted.poll() is not None)
    listeners = sandbox.listeners()
    assert len(listeners) > 5 and not beyond_loopback(listeners)
    replanned = sandbox.run(
        "ray",
        "submit",
        *cluster,
        str(ROOT / "launch" / "replan.py"),
        "--",
        "--budget",
        "80%",
        "--namespace",
        "launched",
    )
    assert "all workers move at their next step" in replanned
    assert submitted.poll() is None, "the replan came in the middle"
    job.hurry()
    code, output = sandbox.ended(submitted)
    assert code == 0, output
    job.assert_complete()
    (round_,) = job.replans()
    assert sorted(round_["weight_bytes"]) == ["0", "1"]
    assert all(0.5 * TOTAL_BYTES < size <= 0.8 * TOTAL_BYTES for size in round_["weight_bytes"].values())
    assert all(size > 0 for size in round_["streamed_bytes"].values())
    assert re.search(r"answers: .*launched\.jsonl", output)

    sandbox.run("ray", "down", "-y", str(cluster_yaml))
    assert "raylet" not in sandbox.run("ps", "-eo", "comm")
