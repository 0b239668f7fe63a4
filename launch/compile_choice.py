"""How a task's model is compiled: not at all, by the engine (``compile_fn``), or by the task itself (``external``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flextensor.config import OffloadConfig
from launch.model_files import TaskInputError

if TYPE_CHECKING:
    from torch import nn

    from flextensor.manager import OffloadManager

logger = logging.getLogger(__name__)

HOW = ("none", "compile_fn", "external")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
OPTIONS = ("compile", "compile_backend", "compile_mode")
"""The task options that make a CompileChoice."""


@dataclass(frozen=True)
class CompileChoice:
    """how: ``compile_fn`` compiles each unit before the profile, so the first plan knows compiled times. ``external``
    profiles eagerly, compiles ``offload_units()`` and ``resident_units()`` at inference, and replans.

    backend and mode are torch.compile's; an empty mode leaves it out.
    """

    how: str = "none"
    backend: str = "inductor"
    mode: str = ""

    @staticmethod
    def parse(options: Mapping[str, Any]) -> CompileChoice:
        """From the task options ``compile``, ``compile_backend`` and ``compile_mode``; others are not looked at.

        Raises TaskInputError that names the option, its value and what is allowed.
        """
        choice = CompileChoice(
            how=options.get("compile", "none"),
            backend=options.get("compile_backend", "inductor"),
            mode=options.get("compile_mode") or "",
        )
        if choice.how not in HOW:
            raise TaskInputError(f"task option compile = {choice.how!r}; use one of {', '.join(HOW)}")
        if choice.mode and choice.mode not in MODES:
            raise TaskInputError(f"task option compile_mode = {choice.mode!r}; use one of {', '.join(MODES)}")
        if not isinstance(choice.backend, str) or choice.backend not in _backends():
            raise TaskInputError(
                f"task option compile_backend = {choice.backend!r}; use one of {', '.join(_backends())}"
            )
        if choice.mode and choice.backend != "inductor":
            raise TaskInputError(
                f"task option compile_mode = {choice.mode!r} is for compile_backend 'inductor', not {choice.backend!r}"
            )
        return choice

    @property
    def compiles(self) -> bool:
        """False for ``none``."""
        return self.how != "none"

    @property
    def captures_graphs(self) -> bool:
        """True for modes in which Inductor captures CUDA graphs."""
        return self.mode in ("reduce-overhead", "max-autotune")

    def offload_config(self, config: OffloadConfig) -> OffloadConfig:
        """``config`` as this choice needs it: ``external_compile`` set or not. Eager times serve only until the replan:
        one step of them is enough, where the caller does not ask for more."""
        if config.external_compile == (self.how == "external"):
            return config
        if self.how != "external":
            return config.updated(external_compile=False)
        one_step = "profiling_iters" not in config.model_fields_set and not config.skip_discovery
        return config.updated(external_compile=True, **({"profiling_iters": 1} if one_step else {}))

    def compile_fn(self) -> Callable[[nn.Module], nn.Module] | None:
        """What ``offload(..., compile_fn=...)`` takes."""
        if self.how != "compile_fn":
            return None

        def compile_unit(module: nn.Module) -> nn.Module:
            import torch

            compiled: Any = torch.compile(module, **self._settings())
            return compiled

        return compile_unit

    def compile_modules(self, modules: Iterable[nn.Module]) -> int:
        """Compile each in place, one graph each, as the units are; returns how many. For ``none``: nothing.

        What an un-offloaded copy must go through to give the same numbers.
        """
        from flextensor.compiled_offload import bump_dynamo_limits_for_compiled_offload

        some = list(modules) if self.compiles else []
        if some:
            bump_dynamo_limits_for_compiled_offload(len(some))
        for module in some:
            module.compile(**self._settings())
        return len(some)

    def compile_externally(self, manager: OffloadManager) -> int:
        """``external``: compile the units of a manager at inference and ask for the replan that knows their times.

        Returns how many steps of the model bring the new plan; then call ``require_replanned``. 0 for other choices.
        Raises OffloadError when the manager could not take a replan; nothing is compiled then.
        """
        if self.how != "external":
            return 0
        from flextensor import OffloadError

        status = manager.strategy_replan_status
        if not manager.external_compile_active or not status.can_request:
            raise OffloadError(f"{manager.name}: no replan for externally compiled units: {status.reason}")
        streamed, resident = manager.offload_units(), manager.resident_units()
        self.compile_modules(module for _, module in (*streamed, *resident))
        logger.info("%s: compiled %d streamed and %d resident units", manager.name, len(streamed), len(resident))
        return manager.request_strategy_replan()

    def require_replanned(self, manager: OffloadManager) -> None:
        """``external``: raise OffloadError unless the plan from compiled times is in force."""
        if self.how != "external":
            return
        from flextensor import OffloadError

        status = manager.strategy_replan_status
        if status.state == "failed" or status.applied is not True:
            why = status.reason or f"the replan is {status.state}"
            raise OffloadError(f"{manager.name}: the plan from compiled times was not put in force: {why}")

    def _settings(self) -> dict[str, Any]:
        # dynamic=False: which kernels run must not depend on the order in which shapes were seen.
        settings: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": self.backend}
        if self.mode:
            settings["mode"] = self.mode
        return settings


def _backends() -> list[str]:
    """What torch.compile knows; those for debugging too."""
    import torch

    names: list[str] = torch._dynamo.list_backends(exclude_tags=())
    return sorted(names)
