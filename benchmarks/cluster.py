"""The cluster benchmark: many workers, one store, one coordinator; on the host device or on real GPUs.

    python -m benchmarks.cluster                                  # host devices here, about 2 minutes
    python -m benchmarks.cluster --workers 4                      # rows for 1, 2 and 4 workers
    python -m benchmarks.cluster --device cuda --workers 2        # one worker a GPU, under 4 minutes on two H200
    python -m benchmarks.cluster --device cuda --workers 2 --num-gpus 0.5      # two workers on one GPU
    python -m benchmarks.cluster --tiny                           # small and quick, for CI

Sections, in this order; each is a try of its own, and what was found is on disk after each: llama (budgets x workers,
the coordinator's cost, replans under load, a killed worker, host memory by the number of workers), contention (two
workers on one link: a plan from solo against one from joint measurements), stack (the engine model; with a worker a
GPU, each link alone and with all at once, and that comparison again), simulated (1024 GPUs), rounds (light actors).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, ROOT, environment, write_results

logger = logging.getLogger(__name__)

SECTIONS = ("llama", "contention", "stack", "simulated", "rounds")
HOST_LINK = 1e9


class Run:
    """Runs sections one after the other and keeps the results on disk as far as they are."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.started = time.monotonic()
        self.data: dict[str, Any] = {
            "benchmark": "cluster",
            "environment": environment(),
            "settings": {
                key: getattr(given, key)
                for key in ("device", "workers", "num_gpus", "seconds", "budgets", "llama_gib", "tokens", "tiny")
            },
            "status": {},
            "scaling": [],
            "memory_by_workers": [],
        }

    def section(self, name: str, work: Callable[[], None]) -> bool:
        """Run one; its status is in the results. False when it failed."""
        limit = self.given.time_limit
        if limit > 0 and time.monotonic() - self.started > limit:
            self.data["status"][name] = "not run: the time limit came first"
            return True
        began = time.monotonic()
        try:
            work()
            self.data["status"][name] = "ok"
        except Exception as error:  # a section that fails is a row; the others go on
            logger.exception("section %s", name)
            self.data["status"][name] = f"failed: {type(error).__name__}: {_first_line(error)}"
        logger.info("%s took %.0f s: %s", name, time.monotonic() - began, self.data["status"][name])
        self.write()
        return bool(self.data["status"][name] == "ok")

    def write(self) -> None:
        """JSON, Markdown and the picture of what there is."""
        from benchmarks.cluster_table import markdown, picture

        self.data["seconds"] = time.monotonic() - self.started
        where = "-tiny" if self.given.tiny else "-host" if self.given.device == "host" else ""
        name = f"cluster{where}{'-one-gpu' if self.shares_gpus else ''}"
        write_results(self.given.output, name, self.data, lambda: markdown(self.data))
        try:
            picture(self.data, self.given.output / f"{name}.png")
        except ImportError as error:
            logger.warning("no picture: %s (pip install matplotlib)", error)

    @property
    def shares_gpus(self) -> bool:
        return self.given.device == "cuda" and self.given.num_gpus < 1

    # ---- sections

    def crew(self, model: str) -> Any:
        from benchmarks.cluster_model import llama_options, stack_options
        from benchmarks.cluster_rig import Crew

        given, cuda = self.given, self.given.device == "cuda"
        options = (
            llama_options(cuda=cuda, gib=given.llama_gib)
            if model == "llama"
            else stack_options(cuda=cuda, tokens=given.tokens)
        )
        task = f"benchmarks.cluster_model:{'LlamaTask' if model == 'llama' else 'StackTask'}"
        return Crew(given.device, given.workers, given.num_gpus, task, options, HOST_LINK)

    def llama(self) -> None:
        """Everything that a text job shows."""
        from benchmarks import cluster_jobs as jobs
        from benchmarks import cluster_sections as sections
        from benchmarks.cluster_rig import rig

        given = self.given
        with rig(self.crew("llama")) as made:
            self.data["setup_seconds"] = {"llama": made.setup_seconds}
            self.data["scaling"] += sections.scaling(made, "llama", given.budgets, given.seconds)
            self.write()
            self.data["coordinator"] = sections.coordinator_cost(made, given.seconds)
            made.replan(budget=0.5)
            expected, self.data["verified"] = jobs.quiet(made, given.steps)
            self.data["replans"] = jobs.replans(made, given.steps, expected, given.replans)
            self.write()
            self.data["kill"] = jobs.killed_worker(made, given.steps, expected)
            self.data["memory_by_workers"] += sections.memory_by_workers(made, "llama")

    def stack(self) -> None:
        """The engine model: what the link does."""
        from benchmarks import cluster_sections as sections
        from benchmarks.cluster_links import links
        from benchmarks.cluster_rig import rig

        with rig(self.crew("stack")) as made:
            self.data["setup_seconds"] = self.data.get("setup_seconds", {}) | {"stack": made.setup_seconds}
            self.data["scaling"] += sections.scaling(made, "stack", self.given.budgets, self.given.seconds)
            self.data["coordinator_stack"] = sections.coordinator_cost(made, self.given.seconds)
            self.write()
            if made.crew.workers > 1 and not self.shares_gpus:
                short = [budget for budget in self.given.budgets if budget <= 0.5]  # at more, copies hide anyway
                self.data["links"] = links(made, short, min(self.given.seconds, 1.0))
            self.data["memory_by_workers"] += sections.memory_by_workers(made, "stack")

    def contention(self) -> None:
        """Two workers on one GPU."""
        from benchmarks.cluster_sections import contention

        crew = self.crew("stack" if self.given.device == "cuda" else "llama")
        self.data["contention"] = contention(crew, self.given.seconds)

    def rounds(self) -> None:
        """Light actors."""
        from benchmarks.cluster_rounds import light_rounds

        found = self.data["rounds"] = []
        for count in self.given.actors:
            found.append(light_rounds(count, rounds=10 if self.given.tiny else 30))

    def simulated(self) -> None:
        """Many GPUs. A call through Ray costs what ``rounds`` has found, or was found on two cores."""
        import ray

        from benchmarks.cluster_rounds import Simulation, light_rounds

        cost = light_rounds(4, rounds=20)["coordinator_cpu_a_call"]
        actor = ray.remote(Simulation).options(num_cpus=0).remote()  # a coordinator lives in an actor
        try:
            self.data["simulated"] = ray.get(actor.run.remote(self.given.simulated_gpus, cost), timeout=120)
        finally:
            ray.kill(actor)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", choices=("host", "cuda"), default="host")
    options.add_argument("--workers", type=int, default=2, help="rows for 1, 2, 4 ... up to so many")
    options.add_argument("--num-gpus", type=float, default=1.0, help="of each worker")
    options.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options.add_argument("--budgets", type=float, nargs="+", help="shares of the weights; default 0.25 0.5 0.75")
    options.add_argument("--llama-gib", type=float, help="size of the random Llama; default 2, on the host 0.03")
    options.add_argument("--tokens", type=int, help="of a step of the engine model; default 4096, on the host 64")
    options.add_argument("--seconds", type=float, help="of one measurement; default 2, on CUDA 1.5, tiny 0.3")
    options.add_argument("--steps", type=int, help="of an item of the jobs; default 16, tiny 8")
    options.add_argument("--actors", type=int, nargs="+", help="light actors; default 8 32, tiny 4")
    options.add_argument("--simulated-gpus", type=int, help="default 1024, tiny 64")
    options.add_argument("--time-limit", type=float, default=200, help="seconds after which no section starts; 0: none")
    options.add_argument("--output", type=Path, default=RESULTS)
    options.add_argument("--tiny", action="store_true", help="small and quick, for CI")
    return options


def complete(given: argparse.Namespace) -> argparse.Namespace:
    """Defaults that depend on other options."""
    cuda, tiny = given.device == "cuda", given.tiny
    given.output = given.output.resolve()
    given.budgets = given.budgets or ([0.5] if tiny else [0.25, 0.5, 0.75])
    given.llama_gib = given.llama_gib or (2.0 if cuda else 0.03)
    given.tokens = given.tokens or (4096 if cuda else 64)
    given.seconds = given.seconds or (0.3 if tiny else 1.5 if cuda else 2.0)
    given.steps = given.steps or (8 if tiny else 16)
    given.actors = given.actors or ([4] if tiny else [8, 32])
    given.simulated_gpus = given.simulated_gpus or (64 if tiny else 1024)
    given.replans = [0.75] if tiny else [0.75, 0.3, 0.5]
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 when a section failed."""
    given = complete(parser().parse_args(arguments))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    run = Run(given)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    import ray

    from cluster.session import start_local

    start_local(gpus=_gpus(given), namespace="benchmarks")
    try:
        done = [run.section(name, getattr(run, name)) for name in SECTIONS if name in given.sections]
    finally:
        ray.shutdown()
    return 0 if all(done) else 1


def _first_line(error: BaseException) -> str:
    """Of the error itself, or of what failed in an actor."""
    cause = getattr(error, "cause", None) or error
    return (str(cause).strip().splitlines() or [""])[0]


def _gpus(given: argparse.Namespace) -> int:
    if given.device == "host":
        return max(given.workers, 1)
    import torch

    count = torch.cuda.device_count()
    if given.workers * given.num_gpus > count:
        raise SystemExit(
            f"{given.workers} workers with {given.num_gpus:g} GPUs each need more than the {count} there are; "
            "give fewer --workers or a smaller --num-gpus"
        )
    return count


if __name__ == "__main__":
    sys.exit(main())
