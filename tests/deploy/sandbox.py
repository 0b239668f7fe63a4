"""A machine of a test's own: PID, network, mount and IPC namespaces, a home and a /dev/shm; the files are this one's.

``ray stop`` and ``ray down`` end Ray's processes by name, machine-wide; here that is the sandbox. What listens in it is
the test's, and all of it ends with the sandbox, however the test ends: its first process waits for the end of a pipe.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "tests" / "cluster"

# bash collects the orphans of its namespace (so it must not become the last command): Ray waits for processes that it
# has killed to be gone.
_INIT = """
mount -t tmpfs -o size=2g tmpfs /dev/shm && mkdir -p /run/sshd && ip link set lo up && echo ready && cat; exit
"""


def missing_for(*commands: str) -> str:
    """Why there can be no sandbox with these commands here ("" when there can)."""
    if os.getuid() != 0:
        return "needs root: namespaces of its own"
    if not sys.platform.startswith("linux"):
        return "needs Linux namespaces"
    absent = [name for name in ("unshare", "nsenter", "mount", "ip", "ss", *commands) if _which(name) is None]
    if absent:
        return f"needs {', '.join(absent)} (Debian: apt-get install openssh-server rsync iproute2 util-linux)"
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


_UNSHARE = ["unshare", "--pid", "--net", "--ipc", "--mount", "--fork", "--mount-proc", "--kill-child"]


def _which(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class Sandbox:
    """``home`` is $HOME of every command, ``folder`` holds it and whatever else the test writes. Use as a context."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fx-"))  # short: Ray's sockets have 107 characters for their paths
        self.home = self.folder / "home"
        for name in ("home", "t", "run", "shm"):
            (self.folder / name).mkdir(mode=0o700)
        self.environment = {
            "HOME": str(self.home),
            "TMPDIR": str(self.folder / "t"),
            "RAY_TMPDIR": str(self.folder / "t"),
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": f"{ROOT}:{TASKS}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "LANG": "C.UTF-8",
        }

    def __enter__(self) -> Sandbox:
        self._init = subprocess.Popen(
            [*_UNSHARE, "bash", "-c", _INIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            text=True,
        )
        assert self._init.stdout is not None
        if self._init.stdout.readline() != "ready\n":
            self.__exit__()
            raise RuntimeError("the sandbox did not start")
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        (self._first,) = children
        return self

    def __exit__(self, *of_the_error: object) -> None:
        assert self._init.stdin is not None
        self._init.stdin.close()
        try:
            self._init.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._init.kill()  # --kill-child takes the namespace along
            self._init.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command; its output and errors come together."""
        return subprocess.Popen(
            [
                "nsenter",
                f"--target={self._first}",
                "--pid",
                "--net",
                "--ipc",
                "--mount",
                f"--wd={self.folder}",
                *command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**self.environment, **environment},
        )

    def ended(self, process: subprocess.Popen[str], timeout: float = 600) -> tuple[int, str]:
        """Its exit code and all of its output."""
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{process.args} did not end within {timeout} s:\n{output}") from None
        return process.returncode, output

    def run(self, *command: str, timeout: float = 600, **environment: str) -> str:
        """The output of a command that must succeed."""
        code, output = self.ended(self.start(*command, **environment), timeout)
        assert code == 0, f"{' '.join(command)} ended with {code}:\n{output}"
        return output

    def start_ray(self, *command: str, **environment: str) -> None:
        """Run a command that starts Ray, which gives its own processes 30 s: on a busy machine, once more."""
        code, output = self.ended(self.start(*command, **environment))
        if code != 0 and "timed out during startup" in output:
            self.run("ray", "stop", "--force")
            code, output = self.ended(self.start(*command, **environment))
        assert code == 0, f"{' '.join(command)} ended with {code}:\n{output}"

    def listeners(self) -> set[str]:
        """Every address that a TCP or UDP socket is bound to, as ``address:port``."""
        lines = self.run("ss", "--no-header", "--listening", "--numeric", "--tcp", "--udp").splitlines()
        return {line.split()[4].replace("[::ffff:127.0.0.1]", "127.0.0.1") for line in lines}


def beyond_loopback(listeners: set[str]) -> set[str]:
    """Those that another machine could reach."""
    return {address for address in listeners if not address.startswith(("127.", "[::1]"))}
