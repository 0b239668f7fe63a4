"""The Inductor correction: mutation-renamed reads count in the tiling analysis again.

[Note: the defect] ``torch._inductor.tiling_utils.extract_normalized_read_writes`` looks up a fused node's reads by the
names of the buffers that it depends on. Where an op in the graph mutates a buffer (the ops at a unit's boundaries
declare the weights as mutated), later reads carry a new, renamed buffer, while the loop body still names the real one:
the look-up finds nothing, the read is missing from the scores, another tiling may be chosen, and with it another order
of additions. The correction looks up both names and counts the real buffer.

It changes one Python function for this process, only where the source is exactly the known one; installed files and
weights stay as they are. Graph cache keys get a suffix from then on, so that graphs from before are not reused.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import textwrap
import threading
from collections.abc import Callable
from typing import Any, Literal

logger = logging.getLogger(__name__)

KNOWN_LOOP = """\
for inp in inputs:
    for expr in body.get_all_read_expr(inp):
        n_reads[expr].add(inp)
"""
CORRECTED_LOOP = """\
for inp in inputs:
    for expr, name in _flextensor_reads(body, inp):
        n_reads[expr].add(name)
"""
KEY_SUFFIX = "flextensor-mutation-reads-2"

Outcome = Literal["applied", "fixed", "unknown", "absent"]

_lock = threading.Lock()
_outcome: Outcome | None = None


def correction_outcome() -> Outcome | None:
    """What ``apply_correction`` found; None before it was called.

    applied: the known defect, corrected. fixed: the code maps the names itself. unknown: another code, left alone.
    absent: this torch has no such function.
    """
    return _outcome


def apply_correction() -> Outcome:
    """Correct Inductor once for this process; later calls give the first outcome.

    Called when the first compiled-offload forward is built, never by an import or an eager offload.
    """
    global _outcome
    with _lock:
        if _outcome is None:
            _outcome = _apply()
        return _outcome


def _apply() -> Outcome:
    try:
        from torch._inductor import tiling_utils
    except ImportError:
        return "absent"
    function = getattr(tiling_utils, "extract_normalized_read_writes", None)
    if function is None:
        return "absent"
    kind, source = classify(function)
    if kind == "fixed":
        return "fixed"
    if kind == "unknown":
        logger.warning(
            "torch's Inductor tiling analysis is of an unknown form and was left alone; check that compiled output "
            "equals the un-offloaded model's"
        )
        return "unknown"
    tiling_utils.extract_normalized_read_writes = corrected(function, source)
    suffix_cache_keys(suffix())
    return "applied"


def classify(function: Callable[..., Any]) -> tuple[Literal["known", "fixed", "unknown"], str]:
    """Which form the function's source has, and that source."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return "unknown", ""
    if "mutation_real_name" in _code_only(source):  # first: names may be mapped before a loop that stays as it was
        return "fixed", source
    if _indented(KNOWN_LOOP) in source:
        return "known", source
    return "unknown", source


def corrected(function: Callable[..., Any], source: str) -> Callable[..., Any]:
    """The function with the known loop replaced, compiled against its own module's globals."""
    changed = source.replace(_indented(KNOWN_LOOP), _indented(CORRECTED_LOOP))
    scope: dict[str, Any] = {}
    exec(
        compile(changed, f"<{function.__module__}.{function.__name__}, corrected>", "exec"), function.__globals__, scope
    )
    function.__globals__["_flextensor_reads"] = reads
    return functools.wraps(function)(scope[function.__name__])


def reads(body: Any, name: str) -> list[tuple[Any, str]]:
    """(index expression, buffer) of what ``body`` reads of ``name``, under the name itself or that of the real buffer.

    The renamed one stands for a mutation and has no size: it is the real buffer that counts.
    """
    from torch._inductor.virtualized import V

    found = body.get_all_read_expr(name)
    if found:
        return [(expression, name) for expression in found]
    scheduler = getattr(V.graph, "scheduler", None)
    real = getattr(scheduler, "mutation_real_name", {}).get(name)
    if real is None or real == name:
        return []
    return [(expression, real) for expression in body.get_all_read_expr(real)]


def _indented(loop: str) -> str:
    return textwrap.indent(loop, " " * 8)


def _code_only(source: str) -> str:
    return "\n".join(line.split("#", 1)[0] for line in source.splitlines())


def suffix_cache_keys(text: str) -> None:
    """The tag in every graph cache key ends in ``text`` from now on, whatever config context is in force when the key
    is built. The caller's own ``cache_key_tag`` setting is not touched."""
    from torch._inductor import codecache

    original = codecache.FxGraphHashDetails.__init__

    @functools.wraps(original)
    def with_suffix(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.cache_key_tag = f"{getattr(self, 'cache_key_tag', '')}{text}"

    codecache.FxGraphHashDetails.__init__ = with_suffix  # type: ignore[method-assign]


def suffix() -> str:
    """What graph cache keys carry: the correction's name and the hash of its text."""
    return f"{KEY_SUFFIX}-{hashlib.sha256(CORRECTED_LOOP.encode()).hexdigest()[:8]}"
