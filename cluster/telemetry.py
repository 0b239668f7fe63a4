"""What the hardware says: NVML, joined to CUDA devices by UUID, and this process's memory.

An index never joins the two: CUDA_VISIBLE_DEVICES, Ray and the driver each number GPUs in their own way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from cluster.messages import DeviceSample, HostSample

if TYPE_CHECKING:
    from flextensor.store import HostStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

_THROTTLE = {
    "nvmlClocksEventReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "hardware thermal",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "software thermal",
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
}

_NOT_ANSWERED = (
    "NVMLError_NotSupported",
    "NVMLError_NoPermission",
    "NVMLError_FunctionNotFound",
    "NVMLError_InvalidArgument",
    "NVMLError_NoData",
)
"""What NVML raises for one question that this GPU, driver or user does not have; any other error is NVML's end."""

SAMPLE_INTERVAL = 0.5
"""Seconds for which a sample is good, however many ask: the driver measures PCIe's throughput for 20 ms a call."""

PSS_INTERVAL = 10.0
"""Seconds between two walks over the page tables: one of 60 GB of small pages takes a while."""


def nvml_uuid(cuda_uuid: str) -> str:
    """NVML's form of the UUID that CUDA (and torch) gives: ``GPU-`` before it, unless it has a prefix."""
    return cuda_uuid if cuda_uuid.startswith(("GPU-", "MIG-")) else f"GPU-{cuda_uuid}"


def cuda_uuid(index: int = 0) -> str | None:
    """The UUID of a CUDA device of this process, which must use CUDA already; None where torch does not tell it."""
    import torch

    if not torch.cuda.is_available():
        return None
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return None if uuid is None else str(uuid)


class DeviceTelemetry:
    """NVML's view of the GPU with a given UUID. Where NVML is absent, or fails at any later call, metrics are off from
    then on, with one warning. Any thread may ask."""

    def __init__(self, uuid: str | None) -> None:
        self._handle: Any = None
        self._nvml: Any = None
        self._name = ""
        self._lock = threading.Lock()
        self._last: DeviceSample | None = None
        self._last_at = float("-inf")
        self.uuid = uuid or ""
        if uuid is None:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self.uuid = nvml_uuid(uuid)
            self._handle = _handle_by_uuid(pynvml, self.uuid)
            name = pynvml.nvmlDeviceGetName(self._handle)
            self._name = name.decode() if isinstance(name, bytes) else str(name)
        except Exception as error:
            self._off(error)

    @property
    def on(self) -> bool:
        """True while NVML answers."""
        return self._handle is not None

    def sample(self) -> DeviceSample | None:
        """The GPU at most SAMPLE_INTERVAL seconds ago; None when metrics are off.

        A field that this GPU does not have is None.
        """
        with self._lock:
            if self._handle is None:
                return None
            if time.monotonic() - self._last_at >= SAMPLE_INTERVAL:
                try:
                    self._last = self._sampled(self._nvml, self._handle)
                except Exception as error:  # ctypes and bindings of other versions raise what they like
                    self._off(error)
                    return None
                self._last_at = time.monotonic()
            return self._last

    def _sampled(self, nvml: Any, handle: Any) -> DeviceSample:
        absent = tuple(getattr(nvml, name) for name in _NOT_ANSWERED if hasattr(nvml, name))

        def ask(question: Callable[[], T]) -> T | None:
            try:
                return question()
            except absent:
                return None

        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        receive = ask(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES) * 1e3)
        send = ask(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES) * 1e3)
        reasons = ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))) or 0
        return DeviceSample(
            uuid=self.uuid,
            name=self._name,
            pcie_generation=ask(lambda: int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))),
            pcie_width=ask(lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))),
            pcie_receive_bytes_per_second=receive,
            pcie_send_bytes_per_second=send,
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
            sm_clock_hz=ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6),
            memory_clock_hz=ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) * 1e6),
            throttle=_reasons(nvml, reasons),
            power_watts=ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            energy_joules=ask(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
            temperature_celsius=ask(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
            utilisation=ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        )

    def close(self) -> None:
        """Give NVML back."""
        with self._lock:
            nvml, self._nvml, self._handle = self._nvml, None, None
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except Exception as error:
                logger.debug("NVML shutdown: %s", error)

    def _off(self, error: Exception) -> None:
        self._handle = None
        logger.warning("GPU metrics are off: NVML says %s: %s", type(error).__name__, error)


def _handle_by_uuid(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except TypeError:  # older bindings want bytes
        return nvml.nvmlDeviceGetHandleByUUID(uuid.encode())


def _reasons(nvml: Any, bits: int) -> tuple[str, ...]:
    names = {name for symbol, name in _THROTTLE.items() if bits & int(getattr(nvml, symbol, 0))}
    return tuple(sorted(names))


class HostTelemetry:
    """This process's memory and its node's. PSS is read at most every PSS_INTERVAL seconds."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._pss = 0
        self._pss_at = float("-inf")
        self._weights_pss = 0
        self._weights_pss_at = float("-inf")

    def sample(self) -> HostSample:
        """Memory now."""
        now = time.monotonic()
        if now - self._pss_at >= PSS_INTERVAL:
            self._pss = process_pss(self._process.pid)
            self._pss_at = now
        memory = psutil.virtual_memory()
        return HostSample(
            rss_bytes=int(self._process.memory_info().rss),
            pss_bytes=self._pss,
            available_bytes=int(memory.available),
            total_bytes=int(memory.total),
        )

    def weights_pss(self, store: HostStore) -> int:
        """This process's part of the node's memory for ``store``; read as seldom as PSS is."""
        from flextensor.store.memory import weights_pss  # brings torch, which asking a run does not need

        now = time.monotonic()
        if now - self._weights_pss_at >= PSS_INTERVAL:
            self._weights_pss = weights_pss([self._process.pid], store)
            self._weights_pss_at = now
        return self._weights_pss


def process_pss(pid: int) -> int:
    """Bytes of memory of a process, each shared page divided by its sharers; 0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
