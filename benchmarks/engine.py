"""The engine benchmark: our engine and every other offloader that is installed, on one model, in one run.

    python -m benchmarks.engine                        # one GPU, about 12 minutes
    python -m benchmarks.engine --tokens 4096 --contenders resident ours public-flextensor
    python -m benchmarks.engine --tiny                 # a small model on the host device, a few seconds

Each contender runs in a process of its own; in each, blocks of its steps alternate with blocks of an un-offloaded twin,
because clocks move. ``--rounds`` repeats everything; ``--resume`` goes on with a run that was cut off.
PUBLIC_FLEXTENSOR names the directory of the public wheel
(``pip install --target DIR flextensor``), FLEXTENSOR_BENCH_COMMIT the commit where there is no ``.git``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_table import markdown
from benchmarks.record import RESULTS, ROOT, environment, write_results
from benchmarks.rows import Row, merge_rounds

logger = logging.getLogger(__name__)

SWEEPS: dict[int, tuple[str, ...]] = {
    1024: ("latency", "6", "2", "1"),
    4096: ("latency", "8", "7", "6", "4", "2", "1", "peak:6.45", "peak:4.63"),
    16384: ("latency", "4", "1"),
}
"""What our engine is asked for at each token count."""
LEAST_MEMORY = ("latency", "1")
TINY_SWEEP = ("latency", "75%", "50%", "35%")
TINY_TOKENS = 64

PROCESS_SECONDS = 600.0
"""Our engine over the whole sweep takes five to six minutes."""


@dataclass(frozen=True)
class Job:
    """One process. ``plan``: token count -> targets."""

    contender: str
    plan: dict[int, list[str]]

    @property
    def settings(self) -> list[tuple[int, str]]:
        """Token count and target of each row."""
        return [(count, target) for count, targets in self.plan.items() for target in targets]


def jobs(tokens: Sequence[int], budgets: Sequence[str], *, tiny: bool, every: bool) -> list[Job]:
    """All processes of one round, what matters most first.

    every: the slow contenders at all token counts too, not at 4096 alone.
    """
    if tiny:
        sweep = list(budgets or TINY_SWEEP)
        lowest = sweep[-1:]
        return [
            Job("resident", {count: [""] for count in tokens}),
            Job("ours", {count: sweep for count in tokens}),
            Job("ours-piece", {count: lowest for count in tokens}),
        ]
    main = [4096] if 4096 in tokens and not every else list(tokens)
    public = {target: [Job("public-flextensor", {count: [target]}) for count in main] for target in ("6", "4", "")}
    ours = Job("ours", {count: list(budgets or SWEEPS.get(count, SWEEPS[4096])) for count in tokens})
    return [
        Job("resident", {count: [""] for count in tokens}),
        ours,
        Job("ours-piece", {count: list(LEAST_MEMORY) for count in main}),
        *public["6"],
        *public["4"],
        Job("diffusers-block", {count: [""] for count in main}),
        *public[""],
        Job("diffusers-leaf", {count: [""] for count in main}),
        Job("resident-compiled", {count: [""] for count in main}),
        Job("accelerate", {count: [""] for count in main}),
    ]


OPTIONAL = ("ours-compiled",)
"""Contenders that run only when named."""


class Driver:
    """Runs jobs one after the other and keeps the results on disk as far as they are."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.rows: list[Row] = []
        self.started = time.monotonic()
        self.environment = environment()
        self.parts: list[dict[str, object]] = []
        if given.resume:
            self._take_up()

    def _take_up(self) -> None:
        """The rows of a run of the same code on the same machine, those that have figures. Raises SystemExit where what
        lies there is of another."""
        path = self.given.output / f"{self.name}.json"
        if not path.exists():
            return
        data = json.loads(path.read_text())
        for key, now in self.environment.items():
            if key != "date" and data["environment"][key] != now:
                raise SystemExit(f"{path} is of another {key} ({data['environment'][key]}, here {now}): start anew")
        self.parts = data["parts"]
        self.rows = [row for row in map(Row.from_json, data["rows"]) if row.step_seconds is not None]

    @property
    def name(self) -> str:
        """Of the files written."""
        return str(self.given.name or ("engine-tiny" if self.given.tiny else "engine"))

    def _is_there(self, job: Job) -> bool:
        return set(job.settings) <= {(row.tokens, row.target) for row in self.rows if row.contender == job.contender}

    def run(self, work: Sequence[Job]) -> None:
        """All rounds."""
        work = [job for job in work if not (self.given.resume and self._is_there(job))]
        anew = {(job.contender, *setting) for job in work for setting in job.settings}
        self.rows = [row for row in self.rows if (row.contender, row.tokens, row.target) not in anew]
        try:
            for round_number in range(self.given.rounds):
                for job in work:
                    if self.time_is_up():
                        self._skip(job, "not run: the time limit came first")
                        continue
                    before = time.monotonic()
                    self._run(job)
                    logger.info("%s took %.0f s (round %d)", job.contender, time.monotonic() - before, round_number + 1)
                    self.write()
        finally:
            self.write()

    def time_is_up(self) -> bool:
        """True when no further process is to be started."""
        limit = self.given.time_limit
        return limit > 0 and time.monotonic() - self.started > limit

    def _skip(self, job: Job, why: str) -> None:
        self.rows += [Row(job.contender, count, target, status=why) for count, target in job.settings]

    def _run(self, job: Job) -> None:
        given = self.given
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.jsonl"
            command = [sys.executable, "-P", "-m", "benchmarks.engine_run", job.contender]
            command += ["--rows", str(file), "--plan", json.dumps(job.plan)]
            command += ["--repeats", str(given.repeats), "--seconds", str(given.seconds)]
            if job.contender == "ours":
                command += ["--trace-directory", str(given.output), "--trace-target", given.trace]
            if given.tiny:
                command.append("--tiny")
            code: int | None = None
            try:
                code = subprocess.run(command, cwd=ROOT, env=child_environment(job), timeout=PROCESS_SECONDS).returncode
            except subprocess.TimeoutExpired:
                pass
            finally:
                how = "stopped: out of time" if code is None else f"failed: exit code {code}"
                self._take_rows(job, file, how)

    def _take_rows(self, job: Job, file: Path, how: str) -> None:
        """What the process wrote; ``how`` stands in the rows that it did not come to."""
        lines = file.read_text().splitlines() if file.exists() else []
        found = [Row.from_json(json.loads(line)) for line in lines]
        self.rows += found
        have = {(row.tokens, row.target) for row in found}
        self.rows += [Row(job.contender, *setting, status=how) for setting in job.settings if setting not in have]

    def write(self) -> None:
        """JSON, Markdown and the picture of what there is."""
        merged = merge_rounds(self.rows)
        data = {
            "benchmark": "engine",
            "environment": self.environment,
            "note": self.given.note,
            "settings": {
                "rounds": self.given.rounds,
                "repeats": self.given.repeats,
                "seconds_a_block": self.given.seconds,
                "tiny": self.given.tiny,
            },
            "parts": [
                *self.parts,
                {"date": self.environment["date"], "seconds": time.monotonic() - self.started},
            ],
            "rows": [row.as_json() for row in merged],
        }
        write_results(self.given.output, self.name, data, lambda: markdown(merged, self.environment, self.given.note))
        from benchmarks.plots import engine_picture

        engine_picture(merged, self.given.output / f"{self.name}.png")


def child_environment(job: Job) -> dict[str, str]:
    """What a contender's process sees: no settings of ours, the public wheel before our tree only where it is meant."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FT_")}
    path = [str(ROOT)]
    public = kept.get("PUBLIC_FLEXTENSOR")
    if job.contender == "public-flextensor" and public:
        path.insert(0, str(Path(public).resolve()))
    kept["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--tokens", type=int, nargs="+", help="default: 4096 1024 16384")
    options.add_argument(
        "--budgets", nargs="+", default=[], help="GiB of weights, 50%%, latency or peak:GiB; default: a sweep"
    )
    options.add_argument("--contenders", nargs="+", help="only these")
    options.add_argument(
        "--resume", action="store_true", help="run only what the results in --output lack, on the same machine"
    )
    options.add_argument("--rounds", type=int, default=1, help="of all processes")
    options.add_argument("--repeats", type=int, default=2, help="of each timed block in a process")
    options.add_argument("--seconds", type=float, help="of one timed block; default 0.5, tiny 0.1")
    options.add_argument("--all-tokens", action="store_true", help="slow contenders at every token count")
    options.add_argument(
        "--time-limit", type=float, default=900, help="seconds after which no process is started; 0: none"
    )
    options.add_argument("--trace", default="6", help="the target of which a trace is written")
    options.add_argument("--output", type=Path, default=RESULTS)
    options.add_argument("--name", help="of the result's files; default engine, tiny engine-tiny")
    options.add_argument("--note", default="", help="said on the page: what else the machine did")
    options.add_argument("--tiny", action="store_true", help="a small model on the host device")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 when one of our own rows failed."""
    given = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    given.output = given.output.resolve()
    given.output.mkdir(parents=True, exist_ok=True)
    given.seconds = given.seconds or (0.1 if given.tiny else 0.5)
    tokens = given.tokens or ([TINY_TOKENS] if given.tiny else [4096, 1024, 16384])
    if given.tiny and given.trace == "6":
        given.trace = (given.budgets or TINY_SWEEP)[-1]
    work = jobs(tokens, given.budgets, tiny=given.tiny, every=given.all_tokens)
    if given.contenders:
        known = [*dict.fromkeys(job.contender for job in work), *OPTIONAL]
        for name in given.contenders:
            if name not in known:
                raise SystemExit(f"no contender {name!r}; there are {', '.join(known)}")
        ours = [job for job in work if job.contender == "ours"]
        work = [job for job in work if job.contender in given.contenders]
        work += [Job(name, job.plan) for name in OPTIONAL if name in given.contenders for job in ours]
    driver = Driver(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was found is written
    driver.run(work)
    return 1 if any(row.status.startswith("failed") for row in driver.rows if row.contender.startswith("ours")) else 0


if __name__ == "__main__":
    sys.exit(main())
