"""Weight offload for PyTorch models larger than their GPU: stream weights from host memory while others compute.

Names are looked up when they are first used, so that what needs no torch (a command that asks a running job) imports
none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flextensor.api import (
        clear_profiling_durations,
        collect_offload_timing,
        get_gpu_memory_usage,
        init,
        load_profile,
        make_device,
        offload,
        offload_block,
        offload_from_profile,
        offload_units,
        pause_profiling,
        release,
        request_strategy_replan,
        reset_offload_timing,
        resident_units,
        resume_profiling,
        save_profile,
        suspend_profiling,
        update_offload_timing,
        update_state,
    )
    from flextensor.config import (
        ConfigError,
        OffloadConfig,
        load_config,
        load_config_from_env,
        load_config_from_file,
    )
    from flextensor.manager import LiveTiming, OffloadManager
    from flextensor.planner.plan import BudgetError, Plan
    from flextensor.profile import Profile, ProfileMismatch
    from flextensor.registry import get_offload_manager
    from flextensor.runtime.timing import format_offload_timing_table
    from flextensor.units import OffloadError

_HOMES = {
    "flextensor.api": (
        "clear_profiling_durations",
        "collect_offload_timing",
        "get_gpu_memory_usage",
        "init",
        "load_profile",
        "make_device",
        "offload",
        "offload_block",
        "offload_from_profile",
        "offload_units",
        "pause_profiling",
        "release",
        "request_strategy_replan",
        "reset_offload_timing",
        "resident_units",
        "resume_profiling",
        "save_profile",
        "suspend_profiling",
        "update_offload_timing",
        "update_state",
    ),
    "flextensor.config": (
        "ConfigError",
        "OffloadConfig",
        "load_config",
        "load_config_from_env",
        "load_config_from_file",
    ),
    "flextensor.manager": (
        "LiveTiming",
        "OffloadManager",
    ),
    "flextensor.planner.plan": (
        "BudgetError",
        "Plan",
    ),
    "flextensor.profile": (
        "Profile",
        "ProfileMismatch",
    ),
    "flextensor.registry": ("get_offload_manager",),
    "flextensor.runtime.timing": ("format_offload_timing_table",),
    "flextensor.units": ("OffloadError",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BudgetError",
    "ConfigError",
    "LiveTiming",
    "OffloadConfig",
    "OffloadError",
    "OffloadManager",
    "Plan",
    "Profile",
    "ProfileMismatch",
    "clear_profiling_durations",
    "collect_offload_timing",
    "format_offload_timing_table",
    "get_gpu_memory_usage",
    "get_offload_manager",
    "init",
    "load_config",
    "load_config_from_env",
    "load_config_from_file",
    "load_profile",
    "make_device",
    "offload",
    "offload_block",
    "offload_from_profile",
    "offload_units",
    "pause_profiling",
    "release",
    "request_strategy_replan",
    "reset_offload_timing",
    "resident_units",
    "resume_profiling",
    "save_profile",
    "suspend_profiling",
    "update_offload_timing",
    "update_state",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is not None:
        return getattr(importlib.import_module(home), name)
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
