"""The Wan benchmark: a 14B-shaped video transformer, compiled and offloaded on both paths, beside it compiled resident.

    python -m benchmarks.wan                  # one GPU with 80 GiB or more and diffusers, under 5 minutes
    python -m benchmarks.wan --tiny           # a small model on the host device, aot_eager, half a minute

Each path runs in a process of its own with empty compile caches, so that its cold start is one. In it, blocks of its
steps alternate with blocks of an un-offloaded twin's. Weights are random: 26.67 GiB that do not fit a 24 GiB budget.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import RESULTS, ROOT, environment, write_results
from benchmarks.rows import Row
from benchmarks.wan_table import markdown

logger = logging.getLogger(__name__)

PATHS = ("resident", "compile_fn", "external")
TARGETS = ("peak:24", "12", "4", "latency")
EXTERNAL_TARGETS = ("peak:24", "12")
"""Of the path whose steps run the same graphs as the other's: its plans, not all of its rows, are the question."""
TINY_TARGETS = ("60%", "35%")
PROCESS_SECONDS = 240.0
MODEL_BYTES = 27 << 30
"""Of the model's weights; twice as many, host memory holds while a contender packs them."""
TOUCH = """\
import sys, torch
from concurrent.futures import ThreadPoolExecutor
torch.set_num_threads(1)
memory = torch.empty(int(sys.argv[1]), dtype=torch.uint8)
with ThreadPoolExecutor() as pool:
    list(pool.map(lambda part: part.fill_(1), memory.split(256 << 20)))
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.wan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    options.add_argument("--workloads", nargs="+", default=["video", "still"], help="video, still")
    options.add_argument(
        "--targets", nargs="+", default=[], help="GiB of weights, 50%%, latency or peak:GiB; default: a sweep"
    )
    options.add_argument("--starts-only", action="store_true", help="only the cold starts")
    options.add_argument("--repeats", type=int, default=1, help="of each timed block")
    options.add_argument("--seconds", type=float, help="of one timed block; default 0.5, tiny 0.05")
    options.add_argument("--backend", help="torch.compile's; default inductor, tiny aot_eager")
    options.add_argument("--mode", default="", help="torch.compile's")
    options.add_argument("--output", type=Path, default=RESULTS)
    options.add_argument("--name", help="of the result's files; default wan, tiny wan-tiny")
    options.add_argument("--note", default="", help="said on the page: what else the machine did")
    options.add_argument("--tiny", action="store_true", help="a small model on the host device")
    options.add_argument("--one", metavar="PATH", help=argparse.SUPPRESS)
    options.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return options


# ---- one path, in a process of its own


def run_one(given: argparse.Namespace) -> int:
    """Measure one path at each workload; a line of JSON in ``--rows`` for each thing known. 1 when it failed."""
    torch.set_grad_enabled(False)
    with given.rows.open("a") as sink:

        def put(kind: str, data: dict[str, Any]) -> None:
            sink.write(json.dumps({kind: data}) + "\n")
            sink.flush()

        try:
            _measure(given, put)
        except Exception as error:
            traceback.print_exc()
            failed = Row(given.one, 0, status=f"failed: {type(error).__name__}: {error}".splitlines()[0])
            put("row", failed.as_json())
            return 1
    return 0


def _measure(given: argparse.Namespace, put: Any) -> None:
    from benchmarks import wan_model
    from benchmarks.ours import Settings
    from launch.compile_choice import CompileChoice

    shape = wan_model.TINY if given.tiny else wan_model.FULL
    device = torch.device("cpu" if given.tiny else "cuda")
    videos = [wan_model.TINY_VIDEO] if given.tiny else [wan_model.VIDEOS[name] for name in given.workloads]
    if given.one == "resident":
        choice = CompileChoice("external", given.backend, given.mode)
        put("start", wan_model.resident_start(shape, videos[0], device, choice).as_json())
        return
    settings = Settings(
        shape=None,  # type: ignore[arg-type]  # the stack's of the engine benchmark
        device="host" if given.tiny else "cuda",
        repeats=given.repeats,
        seconds=given.seconds,
        sustained=2 * given.seconds,
        trace_directory=given.output,
        trace_target=given.targets[1] if len(given.targets) > 1 else given.targets[0],
        resident_below_bytes=4096 if given.tiny else 1 << 20,
        host_link_bytes_per_second=2e9,
    )
    choice = CompileChoice(given.one, given.backend, given.mode)
    for number, video in enumerate(videos):
        sweep = wan_model.WanSweep(choice, shape, video, settings)
        try:
            if given.starts_only:
                put("start", sweep.start.as_json())
                return
            for row in sweep.rows(given.targets):
                put("row", row.as_json())
            sweep.count_later_graphs()
            if not number:  # the first one's start is cold
                put("start", sweep.start.as_json())
            if number == len(videos) - 1 and device.type == "cuda" and given.one == "compile_fn":
                put("row", _graph_row(sweep, settings.trace_target).as_json())
        finally:
            sweep.close()
            del sweep  # its weights, before the next model is built
            torch._dynamo.reset()


def _graph_row(sweep: Any, target: str) -> Row:
    """Last in its process: a capture that fails may leave the GPU's context unusable."""
    try:
        row: Row = sweep.graph_row(target)
        return row
    except Exception as error:
        traceback.print_exc()
        how = f"failed: {type(error).__name__}: {error}".splitlines()[0]
        return Row(f"{sweep.name}-graph", sweep.tokens, target, status=how)


# ---- all paths


def run_all(given: argparse.Namespace) -> int:
    """Each path in its process; results on disk as far as they are. 1 when one failed."""
    found = environment()
    started = time.monotonic()
    if given.backend == "inductor":
        _read_the_compiler()
    if not given.tiny:
        _touch_memory(2 * MODEL_BYTES)
    rows: list[Row] = []
    starts: list[dict[str, Any]] = []
    for path in given.paths:
        before = time.monotonic()
        for line in _lines_of(path, given):
            if "row" in line:
                rows.append(Row.from_json(line["row"]))
            else:
                starts.append(line["start"])
        logger.info("%s took %.0f s", path, time.monotonic() - before)
        data: dict[str, Any] = {
            "benchmark": "wan",
            "environment": found,
            "note": given.note,
            "settings": {
                "backend": given.backend,
                "mode": given.mode,
                "repeats": given.repeats,
                "seconds_a_block": given.seconds,
                "tiny": given.tiny,
                "diffusers": importlib.metadata.version("diffusers"),
            },
            "seconds": time.monotonic() - started,
            "starts": starts,
            "rows": [row.as_json() for row in rows],
        }
        name = given.name or ("wan-tiny" if given.tiny else "wan")
        write_results(given.output, name, data, partial(markdown, rows, starts, found, data["settings"], given.note))
    return 1 if any(row.status.startswith(("failed", "stopped")) for row in rows) else 0


def _read_the_compiler() -> None:
    """Compile something, so that no contender is the one that reads the compiler from disk."""
    program = "import torch, diffusers; d = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    program += "torch.compile(lambda x: (x * 2).sum())(torch.ones(64, device=d))"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", program], env=_environment(Path(folder)), timeout=PROCESS_SECONDS)


def _touch_memory(nbytes: int) -> None:
    """Write to so much host memory, in a process that ends then: a virtual machine is given its memory by its host when
    it first writes to it, and no contender should be the one that waits for that."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", TOUCH, str(nbytes)], timeout=PROCESS_SECONDS, check=True)
    logger.info("%.0f GiB of host memory written to in %.1f s", nbytes / (1 << 30), time.monotonic() - started)


def _lines_of(path: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-P", "-m", "benchmarks.wan", "--one", path, "--rows", str(file)]
        command += ["--output", str(given.output), "--repeats", str(given.repeats), "--seconds", str(given.seconds)]
        command += ["--backend", given.backend, f"--mode={given.mode}", *(["--tiny"] if given.tiny else [])]
        command += ["--starts-only"] if given.starts_only else []
        workloads = given.workloads if path == "compile_fn" else given.workloads[:1]
        targets = given.targets or _default_targets(path, tiny=given.tiny)
        command += ["--targets", *targets, "--workloads", *workloads]
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(command, cwd=ROOT, env=_environment(Path(folder)), timeout=PROCESS_SECONDS).returncode
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if code != 0 and not any("failed" in line.get("row", {}).get("status", "") for line in lines):
        how = f"stopped after {PROCESS_SECONDS:.0f} s" if code is None else f"failed: exit code {code}"
        lines.append({"row": Row(path, 0, status=how).as_json()})
    return lines


def _default_targets(path: str, *, tiny: bool) -> tuple[str, ...]:
    return TINY_TARGETS if tiny else EXTERNAL_TARGETS if path == "external" else TARGETS


def _environment(caches: Path) -> dict[str, str]:
    """No settings of ours, and compile caches that are empty.

    Inductor picks a reduction's configuration by timing it, which changes the order of a sum: two compilations of one
    graph then differ in the last bits, and nothing could be said of ours. Deterministic, both have the same one.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FT_")}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    kept["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    kept["TRITON_CACHE_DIR"] = str(caches / "triton")
    kept["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 when a path failed."""
    given = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    given.output = given.output.resolve()
    given.output.mkdir(parents=True, exist_ok=True)
    given.seconds = given.seconds or (0.05 if given.tiny else 0.5)
    given.backend = given.backend or ("aot_eager" if given.tiny else "inductor")
    return run_all(given) if given.one is None else run_one(given)


if __name__ == "__main__":
    sys.exit(main())
