"""``flextensor store``: the host stores of this machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from flextensor.store.inventory import StoreEntry

app = typer.Typer(
    name="store", help="The shared host weights of this machine.", no_args_is_help=True, add_completion=False
)

Directory = Annotated[str, typer.Option("--dir", help="The tmpfs that holds them (shm_dir).")]
Which = Annotated[str | None, typer.Argument(help="A namespace, an identity or its beginning; default: all.")]


@app.command()
def ls(directory: Directory = "/dev/shm") -> None:
    """List the stores: state, size, users."""
    with _clear_errors():
        from flextensor.store.inventory import list_stores

        entries = list_stores(directory)
        console = Console()
        if not entries:
            console.print(f"no host stores in {directory}")
            return
        table = Table(box=None)
        for column in ("namespace", "identity", "state", "GiB", "units", "weights", "processes", "what"):
            table.add_column(column, overflow="fold")
        for entry in entries:
            table.add_row(
                entry.namespace,
                entry.identity[:12],
                entry.state,
                f"{entry.nbytes / 2**30:.2f}",
                str(entry.units),
                str(entry.tensors),
                " ".join(map(str, entry.holders)) or "-",
                entry.detail,
            )
        console.print(table)


@app.command()
def verify(which: Which = None, directory: Directory = "/dev/shm") -> None:
    """Compare every byte with the checksums taken at filling; exit code 1 when one is wrong."""
    with _clear_errors():
        import time

        from flextensor.store.inventory import verify_store

        console = Console()
        wrong = 0
        for entry in _chosen(which, directory):
            if entry.state in ("filling", "unreadable"):
                console.print(f"{entry.namespace} {entry.identity[:12]}: not checked, {entry.detail}")
                wrong += entry.state == "unreadable"
                continue
            sizes: list[int] = []

            def count(unit: str, nbytes: int, sizes: list[int] = sizes) -> None:
                sizes.append(nbytes)

            started = time.perf_counter()
            errors = list(verify_store(entry, count))
            seconds = time.perf_counter() - started
            for error in errors:
                console.print(str(error), style="red")
            wrong += len(errors)
            rate = sum(sizes) / seconds / 1e9
            console.print(
                f"{entry.namespace} {entry.identity[:12]}: {len(sizes) - len(errors)} of {len(sizes)} units right, "
                f"{sum(sizes) / 2**30:.2f} GiB in {seconds:.2f} s ({rate:.1f} GB/s)"
            )
        if wrong:
            raise typer.Exit(1)


@app.command()
def rm(
    which: Which = None,
    directory: Directory = "/dev/shm",
    everything: Annotated[bool, typer.Option("--all", help="All that nobody uses, when no store is named.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also those in use: their users keep the memory until they end.")
    ] = False,
) -> None:
    """Remove stores. Those in use are refused (or, with --all, left alone) unless --force."""
    with _clear_errors():
        from flextensor.store.errors import StoreError
        from flextensor.store.inventory import remove_store

        console = Console()
        if which is None and not everything:
            raise StoreError("name a store (see flextensor store ls), or say --all")
        for entry in _chosen(which, directory):
            if which is None and not force and entry.state in ("in use", "filling"):
                console.print(f"left {entry.path}: {entry.state}")
                continue
            remove_store(entry, force=force)
            console.print(f"removed {entry.path}")


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    from flextensor.store.errors import StoreError

    try:
        yield
    except StoreError as error:
        print(f"flextensor: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(1) from None


def _chosen(which: str | None, directory: str) -> list[StoreEntry]:
    from flextensor.store.errors import StoreError
    from flextensor.store.inventory import list_stores

    entries = list_stores(directory)
    chosen = [e for e in entries if which is None or e.namespace == which or e.identity.startswith(which)]
    if which is not None and not chosen:
        known = ", ".join(sorted({e.namespace for e in entries})) or "none"
        raise StoreError(f"no host store {which!r} in {directory}; namespaces there: {known}")
    return chosen
