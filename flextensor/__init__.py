"""Weight offload for PyTorch models larger than their GPU: stream weights from host memory while others compute."""

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
