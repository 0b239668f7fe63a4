"""How a command ends: one clear line on stderr and a code that scripts can tell apart."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import typer

from cluster.items import ItemError
from cluster.journal import JournalError
from cluster.pool import NoWorkers
from cluster.session import RayStartError, SessionError
from cluster.task import TaskError
from flextensor.config import ConfigError
from flextensor.planner.plan import BudgetError

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130
TERMINATED = 143

USER_ERRORS = (ConfigError, TaskError, ItemError, JournalError, SessionError, BudgetError)
"""The user can put these right: exit code 2."""


class Terminated(BaseException):
    """SIGTERM arrived."""


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Turn the errors that people can act on into one line on stderr and an exit code."""
    try:
        yield
    except USER_ERRORS as error:
        _line(str(error))
        raise typer.Exit(BAD_INPUT) from None
    except NoWorkers as error:
        by_user = isinstance(error.cause, USER_ERRORS) or _is_of_the_store(error.cause)
        _line(str(error.cause) if by_user else str(error))
        raise typer.Exit(BAD_INPUT if by_user else FAILED) from None
    except RayStartError as error:
        _line(str(error))
        raise typer.Exit(FAILED) from None
    except Terminated:
        raise typer.Exit(TERMINATED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except SystemError as error:
        # A signal that arrives inside Ray's own compiled code comes out of it as the cause of this.
        if isinstance(error.__cause__, Terminated):
            raise typer.Exit(TERMINATED) from None
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise typer.Exit(INTERRUPTED) from None
        raise


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """Within the block SIGTERM and SIGINT raise in the main thread, whatever a library has installed."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, terminate)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Within the block (the clean-up) further SIGINT and SIGTERM are ignored."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _line(text: str) -> None:
    print("flextensor: " + " ".join(text.split()), file=sys.stderr, flush=True)


def _is_of_the_store(error: object) -> bool:
    """True where the host store has no room, or is not the user's: the message says what to do. Such an error has
    come from a worker; to look for one must not import the store, and torch with it, into every command."""
    errors = sys.modules.get("flextensor.store.errors")
    return errors is not None and isinstance(error, errors.StoreSpaceError | errors.StoreAccessError)
