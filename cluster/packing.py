"""How what a script defines travels to the workers: by name, or by cloudpickle, with a clear word on what cannot."""

from __future__ import annotations

import contextlib
import importlib
import logging
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle

from cluster.task import TaskError, TaskFactory

logger = logging.getLogger(__name__)

WARN_BYTES = 1 << 20
LIMIT_BYTES = 64 << 20


def pack(what: str, value: Any) -> bytes:
    """``value`` (a function, class or instance) by cloudpickle; ``what`` names it in messages.

    Warns above 1 MiB with what is large. Raises TaskError for what cannot be pickled, naming what it captures, and for
    more than 64 MiB.
    """
    try:
        packed: bytes = cloudpickle.dumps(value)
    except Exception as error:  # pickling raises what the value's own methods raise
        captured = "; ".join(_refusing(value)) or f"{type(error).__name__}: {error}"
        raise TaskError(
            f"{what} {_name(value)} cannot be sent to the workers: {captured}; make it inside the function, or in a "
            "module that the workers can import"
        ) from error
    if len(packed) > LIMIT_BYTES:
        raise TaskError(
            f"{what} {_name(value)} takes {_mib(len(packed))} along (limit {_mib(LIMIT_BYTES)}){_large(value)}; "
            "load large tensors inside the function"
        )
    if len(packed) > WARN_BYTES:
        logger.warning(
            "%s %s takes %s along to every worker%s; load it inside the function",
            what,
            _name(value),
            _mib(len(packed)),
            _large(value),
        )
    return packed


def pack_task(source: str | TaskFactory) -> str | bytes:
    """The task as it travels: a ``module:name`` string as it is, a callable as ``pack`` has it.

    Raises TaskError for a string of another form, and as ``pack`` does.
    """
    if isinstance(source, str):
        _split(source)
        return source
    return pack("task", source)


def resolve_task(packed: str | bytes) -> TaskFactory:
    """The factory behind what ``pack_task`` made.

    Raises TaskError when a module cannot be imported or has no such name.
    """
    if isinstance(packed, bytes):
        return unpack(packed)
    module_name, name = _split(packed)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise TaskError(f"task {packed!r}: cannot import {module_name!r}: {error}") from error
    try:
        factory = getattr(module, name)
    except AttributeError:
        raise TaskError(f"task {packed!r}: module {module_name!r} has no {name!r}") from None
    return factory


def unpack(packed: bytes) -> Any:
    """What ``pack`` packed.

    Raises TaskError when it needs a module that cannot be imported here.
    """
    try:
        return pickle.loads(packed)
    except ImportError as error:
        raise TaskError(
            f"what was sent needs a module that a worker cannot import: {error}; install it there, put it beside the "
            f"script, or call cloudpickle.register_pickle_by_value({error.name or 'module'}) before"
        ) from error


def _split(source: str) -> tuple[str, str]:
    module, _, name = source.partition(":")
    if not module or not name:
        raise TaskError(f"task {source!r}: write 'module:name', for example 'launch.causal_lm:CausalLMTask'")
    return module, name


def _name(source: Any) -> str:
    return getattr(source, "__qualname__", type(source).__name__)


def _held(source: Any) -> Iterator[tuple[str, Any]]:
    """What a function captures or names of its module, what a partial binds, what a mapping or an instance holds."""
    if isinstance(source, Mapping):
        yield from ((str(key), value) for key, value in source.items())
        return
    code = getattr(source, "__code__", None)
    if code is not None:
        for key, cell in zip(code.co_freevars, source.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # not bound yet
                yield key, cell.cell_contents
        yield from ((key, source.__globals__[key]) for key in code.co_names if key in source.__globals__)
    if hasattr(source, "func") and hasattr(source, "keywords"):  # functools.partial
        yield "func", source.func
        yield from ((f"argument {at}", value) for at, value in enumerate(source.args))
        yield from source.keywords.items()
    yield from ((f"self.{key}", value) for key, value in getattr(source, "__dict__", {}).items())


def _refusing(source: Any, depth: int = 3) -> list[str]:
    """What inside ``source`` refuses to be pickled, as deep as captured functions go."""
    found: list[str] = []
    for key, value in _held(source):
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            inside = _refusing(value, depth - 1) if depth > 0 else []
            found += [f"{key!r}: {each}" for each in inside] or [
                f"it captures {key!r} ({type(value).__name__}: {error})"
            ]
    return found


def _large(source: Any) -> str:
    """The captured values that make up most of the size."""
    sizes = []
    for key, value in _held(source):
        try:
            sizes.append((len(cloudpickle.dumps(value)), key, type(value).__name__))
        except Exception:
            continue
    large = [f"{key!r} ({kind}, {_mib(size)})" for size, key, kind in sorted(sizes, reverse=True)[:3] if size > 1 << 18]
    return f": {', '.join(large)}" if large else ""


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.3g} MiB"
