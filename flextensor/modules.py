"""How units and the root call into the manager: a subclass of the module's own class, made on the fly.

An offloaded module keeps its object, its attributes and its class's name; ``isinstance`` holds. Only ``__call__`` is
new (so that the module's hooks run with its weights there), and what would read or move weights behind the manager's
back is refused with the remedy. All modules of one class share one subclass, so that compiled code is shared too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from flextensor.runtime import ops
from flextensor.units import OffloadError

HANDLE = "_offload_handle"


class Runner(Protocol):
    """What the manager gives a module: how a call of it runs."""

    def run(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``call(*args, **kwargs)``, the module's own call, with everything around it."""


def offload_module(module: nn.Module, handle: Runner) -> None:
    """Route calls of ``module`` through ``handle``."""
    module.__dict__[HANDLE] = handle
    module.__class__ = offloaded_class(type(module))


def guard_inside(module: nn.Module) -> None:
    """Modules inside an offloaded one run as they are, but are not moved, copied or saved whole either.

    In the instance and not by another class: what looks at ``type(module)`` (compilers, adapters) sees no difference.
    """
    for inner in module.modules():
        if not is_offloaded(inner):
            name = type(inner).__name__
            for method, refuse in _REFUSALS.items():
                inner.__dict__[method] = functools.partial(refuse, name)


def restore_module(module: nn.Module) -> None:
    """Make it the plain module that it was; modules inside it, too."""
    for inner in module.modules():
        for method in _REFUSALS:
            inner.__dict__.pop(method, None)
    if is_offloaded(module):
        module.__class__ = type(module).__mro__[1]
        module.__dict__.pop(HANDLE, None)


def _refuse_move(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise OffloadError(
        f"{name} is offloaded: .to(), .cuda(), .half() and their kin would move weights behind the manager's back; "
        "call flextensor.release() first, or set device and dtype before offload()"
    )


def _refuse_copy(name: str, *args: Any) -> NoReturn:
    raise OffloadError(
        f"{name} is offloaded and cannot be copied: its weights are not in the module; copy it before offload(), or "
        "load its state_dict() into a new module"
    )


def _refuse_pickle(name: str, *args: Any) -> NoReturn:
    raise OffloadError(
        f"{name} is offloaded and cannot be pickled or saved whole: save its state_dict(), which has the real weights"
    )


_REFUSALS: dict[str, Callable[..., NoReturn]] = {
    "_apply": _refuse_move,
    "__deepcopy__": _refuse_copy,
    "__reduce_ex__": _refuse_pickle,
}


def is_offloaded(module: nn.Module) -> bool:
    """True for a unit or root of an offloaded model."""
    return HANDLE in module.__dict__


def plain_twin(module: nn.Module) -> nn.Module:
    """An object of the module's own class that shares all its state (one ``__dict__``): what compilers are given."""
    twin: nn.Module = object.__new__(type(module).__mro__[1])
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def offloaded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``cls`` whose calls go through the module's handle; one for each ``cls``."""
    if cls not in _classes:
        _classes[cls] = _make_class(cls)
    return _classes[cls]


def _make_class(cls: type[nn.Module]) -> type[nn.Module]:

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._offload_handle.run(self, functools.partial(cls.__call__, self), args, kwargs)

    def refused(refuse: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        return lambda self, *args, **kwargs: refuse(cls.__name__)

    body = {
        "__call__": __call__,
        **{method: refused(refuse) for method, refuse in _REFUSALS.items()},
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (cls,), body)


class UnitHandle:
    """A unit's way to its manager: calls its ``enter(args, kwargs)``, ``leave()``, ``abort()`` and ``traced()``."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        enter: Callable[[tuple[Any, ...], dict[str, Any]], None],
        leave: Callable[[], None],
        abort: Callable[[], None],
        *,
        traced: Callable[[], None],
    ) -> None:
        self.name = name
        self.module = module
        self.compiled: Callable[..., Any] | None = None
        """Runs instead of the module's own call, when ``compile_fn`` made it."""
        self.around: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] | None = None
        """Makes the call, when units are compiled; None: it is made straight away."""
        self._enter, self._leave, self._abort, self._traced = enter, leave, abort, traced
        self.unit = ops.register_boundary(self)

    def run(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return _run_traced(module, self.unit, call, args, kwargs)
        try:
            self._enter(args, kwargs)
            run = call if self.compiled is None else self.compiled
            result = run(*args, **kwargs) if self.around is None else self.around(run, args, kwargs)
            self._leave()
        except BaseException:  # at any point: a Ctrl-C does not wait for the forward
            self._abort()
            raise
        return result

    def enter_traced(self, weights: list[torch.Tensor]) -> None:
        self._traced()
        self._enter((), {})
        own = _traced_weights(self.module)
        if [w.data_ptr() for w in weights] != [w.data_ptr() for w in own]:
            self._abort()
            raise ops.MonolithicGraphError(
                f"the graph around unit {self.name!r} works on copies of its weights, as backends other than "
                "'inductor' make them; compile each module of manager.offload_units() in place (`module.compile()`), "
                "which any backend can"
            )

    def exit_traced(self) -> None:
        self._leave()


def _traced_weights(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _run_traced(
    module: nn.Module, unit: torch.Tensor, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    ops.note_traced_unit()
    torch.ops.flextensor.pre_compute(_traced_weights(module), unit)
    result = call(*args, **kwargs)
    outputs = _tensors(result) or _tensors((args, kwargs))  # a unit that returns none writes into what it is given
    if not outputs:
        ops.refuse_unit_without_tensors()
    torch.ops.flextensor.post_compute(outputs, unit)
    return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
