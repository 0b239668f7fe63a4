"""Whether a module runs compiled code: by ``torch.compile(module)``, ``module.compile()``, or a ``forward`` that was
replaced by a compiled one or that its class has decorated with ``torch.compile``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """True for the module itself; what is inside it is not looked at."""
    # Not loaded, or being loaded by another thread: nothing is compiled yet. Loading it here would take a second.
    eval_frame: Any = getattr(sys.modules.get("torch._dynamo"), "eval_frame", None)
    if isinstance(module, getattr(eval_frame, "OptimizedModule", ())):
        return True
    if module._compiled_call_impl is not None:
        return True
    forward = module.__dict__.get("forward") or type(module).forward
    # ``torch.compiler.disable`` leaves the same mark, with another beside it.
    return hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False)


def first_compiled(module: nn.Module) -> str | None:
    """The name of the first compiled module in ``module`` (empty: itself); None when there is none."""
    return next((name for name, inner in module.named_modules() if is_compiled(inner)), None)


def any_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether one of them was compiled in place, or its forward was. Cheap enough for every step."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(
        is_compiled(module)
        for module in modules
        if module._compiled_call_impl is not None or "forward" in module.__dict__
    )
