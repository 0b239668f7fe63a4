"""A run's Ray: a local one started for it, or a running cluster; and how other terminals find the run.

A local Ray listens on 127.0.0.1 only, and a run file in the user's own runtime directory tells ``status`` and
``replan`` its address and namespace. The file is held by a lock that ends with the run, so a leftover is told from a
live one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import ray
from ray._private import ray_constants, services
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.exceptions import ActorAlreadyExistsError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.coordinator import NAME, Coordinator
from cluster.memory_monitor import warn_where_it_kills
from cluster.messages import CoordinatorOptions, WorkerStart
from cluster.recovery import WORKER_PREFIX
from cluster.whole_files import file_stem
from cluster.worker import Worker

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 100 << 20
LOOPBACK = "127.0.0.1"
RESTARTS = 2
START_ATTEMPTS = 2
CONNECT_TIMEOUT = 5.0
NAME_TIMEOUT = 30.0
"""How long Ray may take to give back the name of an actor whose callers know already that it is dead."""


class SessionError(ValueError):
    """Ray or a run that cannot be used as asked; the message names it and the remedy."""


class RayStartError(RuntimeError):
    """A Ray of our own did not start; the message has Ray's reason."""


@dataclass(frozen=True)
class RunFile:
    """Where a run can be reached. ``address`` is Ray's (GCS) address, ``auth`` its RAY_AUTH_MODE ("" unset)."""

    namespace: str
    address: str
    pid: int
    started: float
    output: str
    auth: str = ""


def quiet_ray_environment() -> None:
    """What Ray's processes inherit from ours. Set before Ray starts; what the user has set stays.

    The memory monitor counts the pages of a tmpfs as used and would kill workers for the shared weights.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")


def _keep_to_loopback() -> None:
    """Ray takes 127.0.0.1 for "this machine" and replaces it by an address that others reach, unless it is told that no
    other machine will join. Its processes inherit the variable; this one has read it already."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def _is_loopback_only(address: str) -> bool:
    """True for a Ray of ``start_local``: its port answers on 127.0.0.1 and not on the machine's own address."""
    host, _, port = address.rpartition(":")
    own = services.get_node_ip_address()
    if host != LOOPBACK or own == LOOPBACK or not port.isdigit():
        return False
    try:
        socket.create_connection((own, int(port)), timeout=CONNECT_TIMEOUT).close()
    except OSError:
        return True
    return False


def start_local(*, gpus: int, namespace: str) -> str:
    """Start a Ray of our own on this machine with ``gpus`` (real or logical) GPUs; its address.

    Raises RayStartError.
    """
    quiet_ray_environment()
    _keep_to_loopback()
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            context = ray.init(
                "local",
                num_gpus=gpus,
                namespace=namespace,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                _node_ip_address=LOOPBACK,
            )
            return str(context.address_info["gcs_address"])
        except Exception as error:  # bare Exceptions: on a busy machine Ray gives its own processes 30 s and no more
            ray.shutdown()
            if attempt == START_ATTEMPTS:
                raise RayStartError(f"Ray did not start on this machine: {error}") from error
            logger.warning("Ray did not start (%s); once more", error)
    raise AssertionError("not reached")


def attach(address: str, *, namespace: str, auth: str = "", shm_dir: str | None = "/dev/shm") -> str:
    """Attach to a running Ray; its address.

    shm_dir: warn of nodes whose memory monitor can kill workers for a store there; None: no store is to be made.
    Raises SessionError when there is none at ``address``.
    """
    _refuse_silence(address)
    quiet_ray_environment()
    if _is_loopback_only(address):
        _keep_to_loopback()
    if auth and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = auth
        Config.initialize("")  # Ray read it when it was imported, and would wait for ever for an answer without a token
    try:
        context = ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        mode = os.environ.get("RAY_AUTH_MODE", "unset")
        raise SessionError(
            f"no Ray cluster answers at {address!r} ({first}); check --address and, where the cluster asks for a "
            f"token, ~/.ray/auth_token and RAY_AUTH_MODE=token (it is {mode})"
        ) from error
    if shm_dir is not None:
        warn_where_it_kills(shm_dir)
    return str(context.address_info["gcs_address"]) if "gcs_address" in context.address_info else address


def _refuse_silence(address: str) -> None:
    """Ray tries a port that nobody listens at for minutes; one look is enough."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        raise SessionError(
            f"no Ray cluster answers at {address!r} ({error.strerror or error}); check --address"
        ) from None


def require_gpus(workers: int, per_worker: float) -> None:
    """Refuse now what would wait for ever: more workers than the cluster has GPUs for.

    Raises SessionError.
    """
    available = float(ray.cluster_resources().get("GPU", 0))
    if workers * per_worker > available + 1e-9:
        fits = math.floor(available / per_worker + 1e-9)
        raise SessionError(
            f"{workers} workers with num_gpus {per_worker:g} each need {workers * per_worker:g} GPUs, the cluster has "
            f"{available:g}; ask for {fits} workers, a smaller num_gpus, or start Ray with --num-gpus"
        )


def make_coordinator(options: CoordinatorOptions) -> Any:
    """The run's coordinator on this node, in the run's namespace."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = ray.remote(Coordinator).options(
        name=NAME,
        namespace=options.namespace,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        scheduling_strategy=here,
        runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
    )
    return actor.remote(options)


def make_worker(start: WorkerStart, *, num_gpus: float) -> Any:
    """The actor of one rank. Ray starts it again RESTARTS times when it dies; its calls are never repeated by Ray.

    Raises ActorAlreadyExistsError when the rank's actor before this one does not give its name back.
    """
    actor = ray.remote(concurrency_groups={"control": 4})(Worker).options(
        name=f"{WORKER_PREFIX}{start.rank}",
        namespace=start.namespace,
        num_cpus=0,
        num_gpus=num_gpus,
        max_restarts=RESTARTS,
        max_task_retries=0,
    )
    end = time.monotonic() + NAME_TIMEOUT
    while True:
        try:
            return actor.remote(start)
        except ActorAlreadyExistsError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def runtime_directory() -> Path:
    """This user's directory for run files, mode 0700.

    Raises SessionError when it belongs to someone else.
    """
    root = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(root) / "flextensor" if root else Path(tempfile.gettempdir()) / f"flextensor-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or path.is_symlink():
        raise SessionError(f"{path} is not this user's own directory; remove it, or set XDG_RUNTIME_DIR")
    if found.st_mode & 0o077:
        path.chmod(0o700)
    return path


@contextlib.contextmanager
def announced(run: RunFile) -> Iterator[Path]:
    """The run file, there and locked while the block runs."""
    path = runtime_directory() / f"{file_stem(run.namespace)}-{run.pid}.json"
    beside = path.with_suffix(".part")
    with open(os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(asdict(run), file)
        file.flush()
        beside.rename(path)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def live_runs() -> list[RunFile]:
    """The runs of this user on this machine, newest first; files of dead ones are removed."""
    runs = []
    for path in runtime_directory().glob("*.json"):
        try:
            with open(path) as file:
                if not _is_held(file):
                    path.unlink(missing_ok=True)
                    continue
                runs.append(RunFile(**json.load(file)))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(runs, key=lambda run: -run.started)


def _is_held(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def find_run(*, address: str | None, namespace: str | None) -> Any:
    """Attach to a run from another terminal; its coordinator's handle.

    Raises SessionError when there is no such run, or several and none was named.
    """
    auth = ""
    if address is None:
        runs = [run for run in live_runs() if namespace in (None, run.namespace)]
        if not runs:
            what = f"no run in namespace {namespace!r}" if namespace else "no run"
            raise SessionError(f"{what} of this user is going on here; for one on a cluster give --address")
        if len(runs) > 1:
            names = ", ".join(run.namespace for run in runs)
            raise SessionError(f"several runs are going on; name one with --namespace: {names}")
        address, namespace, auth = runs[0].address, runs[0].namespace, runs[0].auth
    attach(address, namespace=namespace or "flextensor-client", auth=auth, shm_dir=None)
    if namespace is None:
        namespace = _only_namespace()
    try:
        return ray.get_actor(NAME, namespace=namespace)
    except ValueError:
        raise SessionError(f"no run in namespace {namespace!r} at {address}") from None


def _only_namespace() -> str:
    spaces = sorted({a["namespace"] for a in ray.util.list_named_actors(all_namespaces=True) if a["name"] == NAME})
    if len(spaces) != 1:
        raise SessionError(
            f"several runs are going on; name one with --namespace: {', '.join(spaces)}"
            if spaces
            else "no run is going on there"
        )
    return spaces[0]
