"""NVML by UUID only, and off with one warning where it is not there."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from cluster.messages import DeviceSample
from cluster.telemetry import DeviceTelemetry, HostTelemetry, cuda_uuid, nvml_uuid, process_pss


@pytest.mark.skipif(torch.cuda.is_available(), reason="NVML is there")
def test_without_nvml_metrics_are_off_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        telemetry = DeviceTelemetry("00000000-0000-0000-0000-000000000000")
        assert [telemetry.sample() for _ in range(3)] == [None] * 3
    telemetry.close()
    assert len(caplog.records) == 1 and "metrics are off" in caplog.text


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
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    after = telemetry.sample()
    assert after is not None and after.memory_used_bytes is not None
    assert after.memory_used_bytes - before.memory_used_bytes >= held.numel() // 2
    assert after.pcie_generation and after.pcie_width and after.power_watts and after.temperature_celsius
    telemetry.close()
