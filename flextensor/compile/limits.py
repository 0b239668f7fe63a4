"""Dynamo's limits on recompilation, raised so that no unit silently falls back to eager."""

from __future__ import annotations

import torch

MARGIN = 8
"""Graphs beyond one a unit: input shapes, grad modes."""


def bump_dynamo_limits_for_compiled_offload(units: int) -> None:
    """Let Dynamo keep a graph for each of ``units`` units and some more; never lowers a limit.

    Units of one class share one code object, whose graphs Dynamo counts together: with the default limit of 8, the
    ninth unit that needs a graph of its own (an index attribute that its forward reads) would run eagerly.
    """
    config = torch._dynamo.config
    wanted = units + MARGIN
    for name, factor in (("recompile_limit", 1), ("accumulated_recompile_limit", 4)):
        if hasattr(config, name):
            setattr(config, name, max(getattr(config, name), wanted * factor))
