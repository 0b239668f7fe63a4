"""One contender of the engine benchmark in this process; ``benchmarks.engine`` starts these.

    python -P -m benchmarks.engine_run ours --rows FILE --plan '{"4096": ["6", "latency"]}'

Each row is appended to FILE as one line of JSON as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.model import FULL, TINY
from benchmarks.rows import Row

logger = logging.getLogger(__name__)

TINY_LINK = 2e9


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.engine_run", description=__doc__)
    options.add_argument("contender")
    options.add_argument("--rows", type=Path, required=True, help="file that rows are appended to")
    options.add_argument("--plan", required=True, help="JSON: token count -> targets")
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument("--seconds", type=float, default=0.5, help="of one timed block")
    options.add_argument("--trace-directory", type=Path)
    options.add_argument("--trace-target", default="6")
    options.add_argument("--tiny", action="store_true", help="a small model on the host device")
    return options


def rows_of(name: str, plan: dict[int, list[str]], given: argparse.Namespace) -> Iterator[Row]:
    """The contender's rows. Imports our engine, or the public one of the same name, only when asked for it."""
    shape = TINY if given.tiny else FULL
    if name.startswith("ours"):
        from benchmarks import ours

        settings = ours.Settings(
            shape,
            "host" if given.tiny else "cuda",
            repeats=given.repeats,
            seconds=given.seconds,
            sustained=2 * given.seconds,
            trace_directory=given.trace_directory,
            trace_target=given.trace_target,
            resident_below_bytes=4096 if given.tiny else 1 << 20,
            host_link_bytes_per_second=TINY_LINK,
        )
        yield from ours.run(name, list(plan), lambda count: plan[count], settings)
        return
    from benchmarks import others

    device = torch.device("cpu" if given.tiny else "cuda")
    for target in dict.fromkeys(target for targets in plan.values() for target in targets):
        tokens = [count for count, targets in plan.items() if target in targets]
        try:
            yield from others.run(name, tokens, target, shape, device, given.repeats, given.seconds)
        except others.NotInstalled as missing:
            yield from (Row(name, count, target, status=str(missing)) for count in tokens)


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 when the contender failed (a row for each setting without figures says how)."""
    given = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_grad_enabled(False)
    plan = {int(count): list(targets) for count, targets in json.loads(given.plan).items()}
    missing = {(count, target) for count, targets in plan.items() for target in targets}
    with given.rows.open("a") as sink:

        def put(row: Row) -> None:
            sink.write(json.dumps(row.as_json()) + "\n")
            sink.flush()
            missing.discard((row.tokens, row.target))

        try:
            for row in rows_of(given.contender, plan, given):
                put(row)
        except Exception as error:
            traceback.print_exc()
            for count, target in sorted(missing):
                put(Row(given.contender, count, target, status=f"failed: {type(error).__name__}: {error}"))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
