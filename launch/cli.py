"""The command line. Each command's work is in a module of its own, imported when the command runs."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    name="flextensor",
    help="Run PyTorch models whose weights do not fit the GPU, on every GPU at once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Address = Annotated[str | None, typer.Option(help="A running Ray cluster (host:port or auto); default: this machine.")]
Namespace = Annotated[str | None, typer.Option(help="The run's namespace, where several runs are going on.")]


@app.callback()
def options(verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False) -> None:
    """Run PyTorch models whose weights do not fit the GPU, on every GPU at once."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        stream=sys.stderr,
        format="%(levelname)s %(name)s: %(message)s",
    )


@app.command()
def generate(
    config: Annotated[Path | None, typer.Option(help="A YAML file, for example configs/demo.yaml.")] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face model directory.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines, .parquet or .txt.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where the answers go: JSON lines, or .parquet.")] = None,
    report: Annotated[Path | None, typer.Option(help="Where the report goes (JSON).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start the output anew; default: resume it.")] = False,
    workers: Annotated[str | None, typer.Option(help="How many, or auto: one a GPU.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, host or auto.")] = None,
    num_gpus: Annotated[float | None, typer.Option(help="GPUs a worker takes; 0.5: two share one.")] = None,
    budget: Annotated[str | None, typer.Option(help="Weights on each device: 6GiB, or 40% of the model's.")] = None,
    batch_size: Annotated[
        str | None, typer.Option(help="Items that a worker runs at once, or auto: as many as bring the most.")
    ] = None,
    verify: Annotated[int | None, typer.Option(help="Run so many items again without offload and compare.")] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A small random model in the place of --model, for tasks that have one.")
    ] = False,
    keep_store: Annotated[
        bool, typer.Option("--keep-store", help="Leave the shared weights in memory for the next run (store rm).")
    ] = False,
    address: Address = None,
    namespace: Namespace = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other key: --set task_options.max_new_tokens=64")
    ] = None,
) -> None:
    """Answer a file of prompts on all workers."""
    from launch.errors import clear_errors

    with clear_errors():
        from launch.generate import generate as run_generate
        from launch.run_config import load_run_config, parse_assignments

        overrides = parse_assignments(settings or [])
        flags: dict[str, Any] = {
            "model": model,
            "prompts": prompts,
            "output": output,
            "report": report,
            "overwrite": overwrite or None,
            "workers": workers,
            "device": device,
            "num_gpus": num_gpus,
            "budget": budget,
            "batch_size": batch_size,
            "verify": verify,
            "address": address,
            "namespace": namespace,
            "task_options.tiny": tiny or None,
            "offload.shm_keep": keep_store or None,
        }
        overrides |= {key: value for key, value in flags.items() if value is not None}
        run_generate(load_run_config(config, overrides), console=_console())


@app.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", help="Again each second, until the run ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    address: Address = None,
    namespace: Namespace = None,
) -> None:
    """Show a run's workers: plan, step time, stall, link, memory."""
    from launch.errors import clear_errors

    with clear_errors():
        from launch.status import show_status

        show_status(address=address, namespace=namespace, watch=watch, as_json=as_json, console=_console())


@app.command()
def replan(
    budget: Annotated[
        str | None, typer.Option(help="Weights on each device: 6GiB, 40%, or latency; default: as it is.")
    ] = None,
    workers: Annotated[str | None, typer.Option(help="Ranks that get a new plan: 0,2; default: all.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would come of it; change nothing.")] = False,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Use the link as it was profiled.")] = False,
    address: Address = None,
    namespace: Namespace = None,
) -> None:
    """Move all workers of a run to a new plan at the same step."""
    from launch.errors import clear_errors

    with clear_errors():
        from launch.replan import request_of, run_replan

        request = request_of(budget, workers, measure=not no_measure, dry_run=dry_run)
        if not run_replan(request, address=address, namespace=namespace, console=_console()):
            raise typer.Exit(1)


@app.command()
def rollback(address: Address = None, namespace: Namespace = None) -> None:
    """Move all workers of a run back to the plan before."""
    from launch.errors import clear_errors

    with clear_errors():
        from launch.replan import run_rollback

        if not run_rollback(address=address, namespace=namespace, console=_console()):
            raise typer.Exit(1)


@app.command()
def pause(address: Address = None, namespace: Namespace = None) -> None:
    """Let all workers of a run stand at their next step boundary."""
    from launch.errors import clear_errors

    with clear_errors():
        from launch.replan import run_pause

        run_pause(True, address=address, namespace=namespace, console=_console())


@app.command()
def resume(address: Address = None, namespace: Namespace = None) -> None:
    """Let the workers of a paused run go on."""
    from launch.errors import clear_errors

    with clear_errors():
        from launch.replan import run_pause

        run_pause(False, address=address, namespace=namespace, console=_console())


_LATER = {"plan": "launch.plan", "trace": "launch.trace"}
"""Commands whose modules import torch: taken in when they are asked for, or listed."""


def _register(arguments: list[str]) -> None:
    from launch.store import app as store_app

    app.add_typer(store_app, name="store")
    first = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, module in _LATER.items():
        if first in (name, None) and importlib.util.find_spec(module) is not None:
            app.command(name)(getattr(importlib.import_module(module), name))


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=120)


def main(arguments: list[str] | None = None) -> None:
    """The ``flextensor`` command. ``arguments``: in place of the command line's."""
    given = sys.argv[1:] if arguments is None else arguments
    _register(given)
    app(given)
