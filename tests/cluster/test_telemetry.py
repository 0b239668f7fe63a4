"""NVML by UUID only, and off with one warning where it is not there."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.messages import DeviceSample
from cluster.telemetry import SAMPLE_INTERVAL, DeviceTelemetry, HostTelemetry, cuda_uuid, nvml_uuid, process_pss


@pytest.mark.skipif(torch.cuda.is_available(), reason="NVML is there")
def test_without_nvml_metrics_are_off_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        telemetry = DeviceTelemetry("00000000-0000-0000-0000-000000000000")
        assert [telemetry.sample() for _ in range(3)] == [None] * 3
    telemetry.close()
    assert len(caplog.records) == 1 and "metrics are off" in caplog.text


class BrokenNvml:
    """What pynvml looks like (NVML itself is not here); after ``lost`` answers each call fails."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_NoPermission(NVMLError):
        pass

    NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES = 1, 0
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40

    def __init__(self, lost: int, error: Exception | None = None) -> None:
        self.left, self.asked, self.error = lost, Counter[str](), error or self.NVMLError("GPU is lost")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("nvmlDevice", "nvmlInit", "nvmlShutdown")):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.asked[name] += 1
            self.left -= 1
            if self.left < 0:
                raise self.error
            if name == "nvmlDeviceGetTotalEnergyConsumption":
                raise self.NVMLError_NotSupported
            if name == "nvmlDeviceGetPcieThroughput":
                raise self.NVMLError_NoPermission
            if name == "nvmlDeviceGetMemoryInfo":
                return SimpleNamespace(used=3 << 30, total=80 << 30)
            if name == "nvmlDeviceGetUtilizationRates":
                return SimpleNamespace(gpu=50)
            return {"nvmlDeviceGetName": b"NVIDIA Test", "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40}.get(name, 5)

        return call


CALLS_OF_A_SAMPLE = 12
SET_UP_CALLS = 3


@pytest.mark.parametrize("lost", range(SET_UP_CALLS + 2 * CALLS_OF_A_SAMPLE))
def test_nvml_that_fails_at_any_call_is_off_from_then_on_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: int
) -> None:
    nvml = BrokenNvml(lost)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("cluster.telemetry.SAMPLE_INTERVAL", 0.0)
    with caplog.at_level(logging.WARNING):
        telemetry = DeviceTelemetry("0000")
        samples = [telemetry.sample() for _ in range(4)]
        asked = nvml.asked.total()
        assert telemetry.sample() is None and nvml.asked.total() == asked, "it asks again after it was off"
        telemetry.close()
    assert len(caplog.records) == 1 and "metrics are off" in caplog.text and "GPU is lost" in caplog.text
    whole = sum(sample is not None for sample in samples)
    assert whole == max(lost - SET_UP_CALLS, 0) // CALLS_OF_A_SAMPLE
    assert not telemetry.on


def test_fields_that_a_gpu_does_not_have_are_none_and_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = BrokenNvml(10**6)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("cluster.telemetry.SAMPLE_INTERVAL", 60.0)
    telemetry = DeviceTelemetry("0000")
    sample = telemetry.sample()
    assert sample is not None and telemetry.uuid == sample.uuid == "GPU-0000" and sample.name == "NVIDIA Test"
    assert sample.energy_joules is None and sample.pcie_receive_bytes_per_second is None
    assert sample.throttle == ("hardware thermal",) and sample.pcie_generation == 5 and sample.utilisation == 0.5
    asked = nvml.asked.total()
    assert asked == SET_UP_CALLS + CALLS_OF_A_SAMPLE
    assert telemetry.sample() is sample and nvml.asked.total() == asked, "many who ask are one question"
    assert not caplog.records


def test_bindings_that_lack_a_function_turn_metrics_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", BrokenNvml(SET_UP_CALLS + 4, AttributeError("no such function")))
    telemetry = DeviceTelemetry("0000")
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: telemetry.sample(), range(8))) == [None] * 8
    assert len(caplog.records) == 1 and "no such function" in caplog.text


def test_a_host_device_asks_no_nvml(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert DeviceTelemetry(None).sample() is None
    assert not caplog.records


def test_the_uuid_takes_nvmls_form() -> None:
    assert nvml_uuid("1234-5678") == "GPU-1234-5678"
    assert nvml_uuid("GPU-1234") == "GPU-1234" and nvml_uuid("MIG-1") == "MIG-1"


def test_the_links_nominal_rate_follows_generation_and_width() -> None:
    sample = DeviceSample(uuid="", name="", pcie_generation=5, pcie_width=16)
    assert sample.link_nominal_bytes_per_second == pytest.approx(63e9, rel=0.01)
    assert DeviceSample(uuid="", name="").link_nominal_bytes_per_second is None


def test_memory_of_this_process_is_told() -> None:
    sample = HostTelemetry().sample()
    assert sample.rss_bytes > 1 << 20 and sample.total_bytes > sample.available_bytes > 0
    assert 0 < sample.pss_bytes < 2 * sample.rss_bytes
    assert process_pss(os.getpid()) > 0 and process_pss(2**22 - 1) == 0


@pytest.mark.gpu
def test_the_gpu_that_cuda_uses_is_the_one_that_nvml_samples() -> None:
    torch.zeros(1, device="cuda")
    telemetry = DeviceTelemetry(cuda_uuid(0))
    before = telemetry.sample()
    assert before is not None and before.memory_used_bytes is not None
    held = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")  # more than tests beside this one give back
    time.sleep(SAMPLE_INTERVAL)
    after = telemetry.sample()
    assert after is not None and after.memory_used_bytes is not None
    assert after.memory_used_bytes - before.memory_used_bytes >= held.numel() // 2
    assert after.pcie_generation and after.pcie_width and after.power_watts and after.temperature_celsius
    telemetry.close()
