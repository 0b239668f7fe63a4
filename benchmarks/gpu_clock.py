"""The GPU's clock as NVML tells it, to say whether two timed blocks ran at the same one. Hz."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cluster.telemetry import cuda_uuid, nvml_uuid


def sm_clock(device: torch.device) -> Callable[[], float | None]:
    """What asks for the clock of the streaming multiprocessors now; None where there is no GPU, or NVML is silent."""
    handle: Any = None
    uuid = cuda_uuid(device.index or 0) if device.type == "cuda" else None
    if uuid is not None:
        import pynvml

        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(nvml_uuid(uuid))
        except pynvml.NVMLError:
            handle = None

    def ask() -> float | None:
        if handle is None:
            return None
        try:
            return float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)) * 1e6
        except pynvml.NVMLError:
            return None

    return ask
