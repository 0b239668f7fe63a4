"""``FT_<FIELD>`` sets every field of the configuration; a misspelt variable is an error that names the nearest."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import flextensor as ft

TEXTS: dict[str, tuple[str, Any]] = {
    "enabled": ("0", False),
    "gpu_device": ("host", "host"),
    "pinned_memory": ("false", False),
    "include_patterns": ("layers.*, head", ("layers.*", "head")),
    "exclude_patterns": ('["name:*.bias", "class:A,B"]', ("name:*.bias", "class:A,B")),
    "transfer_mode": ("raw_block_transfer", "raw_block_transfer"),
    "num_blocks": ("4", 4),
    "min_blocks": ("2", 2),
    "max_gpu_mem_fraction": ("0.5", 0.5),
    "budget_bytes": ("6GiB", 6 << 30),
    "budget_fraction": ("0.25", 0.25),
    "transfer_budget_scale": ("0.8", 0.8),
    "discovery_iters": ("3", 3),
    "skip_discovery": ("true", True),
    "profiling_iters": ("5", 5),
    "profile_mode": ("getter", "getter"),
    "external_compile": ("1", True),
    "offload_timing": ("cuda_graph", "cuda_graph"),
    "profile_storage_dir": ("/profiles", "/profiles"),
    "profile_read_only": ("yes", True),
    "shm_enabled": ("1", True),
    "shm_namespace": ("mine", "mine"),
    "shm_wait_timeout": ("12.5", 12.5),
    "shm_dir": ("/dev/hugepages", "/dev/hugepages"),
    "shm_backing": ("memfd", "memfd"),
    "shm_keep": ("1", True),
    "shm_scrub_share": ("0.05", 0.05),
    "enable_diagnostics": ("1", True),
    "resident_below_bytes": ("64KiB", 64 << 10),
    "stream_granularity": ("piece", "piece"),
    "host_memory_bytes": ("1.5 GB", 1_500_000_000),
    "host_link_bytes_per_second": ("2GB/s", 2e9),
}
"""For each field a text that is not its default, and what it means."""


def test_each_field_has_a_text_here() -> None:
    assert TEXTS.keys() == ft.OffloadConfig.model_fields.keys()


@pytest.mark.parametrize("field", TEXTS)
def test_a_variable_sets_its_field_and_no_other_and_an_argument_wins(field: str, monkeypatch) -> None:
    text, meant = TEXTS[field]
    default = ft.OffloadConfig().model_dump()
    assert meant != default[field]
    monkeypatch.setenv(f"FT_{field.upper()}", text)
    assert ft.load_config().model_dump() == {**default, field: meant}
    assert ft.load_config_from_env().keys() == {field}
    assert ft.load_config(**{field: default[field]}).model_dump() == default


@pytest.mark.parametrize("field", ["num_blocks", "max_gpu_mem_fraction", "budget_bytes", "profile_storage_dir"])
@pytest.mark.parametrize("text", ["none", "null", ""])
def test_a_variable_can_say_none(field: str, text: str, monkeypatch, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{field}: 1\n" if field != "profile_storage_dir" else f"{field}: here\n")
    assert getattr(ft.load_config(file), field) is not None
    monkeypatch.setenv(f"FT_{field.upper()}", text)
    assert getattr(ft.load_config(file), field) is None


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("FT_EXTERNAL_COMPIL", "FT_EXTERNAL_COMPILE"),
        ("FT_BUDGET_BYTE", "FT_BUDGET_BYTES"),
        ("FT_DEVICE", "FT_GPU_DEVICE"),
    ],
)
def test_a_misspelt_variable_is_an_error_that_names_the_nearest(variable: str, nearest: str, monkeypatch) -> None:
    monkeypatch.setenv(variable, "1")
    says = rf"unknown environment variable '{variable}'; did you mean '{nearest}'"
    for read in (ft.load_config, ft.load_config_from_env, offload_with_a_configuration_of_its_own):
        with pytest.raises(ft.ConfigError, match=says):
            read()


def offload_with_a_configuration_of_its_own() -> None:
    ft.offload(nn.Sequential(nn.Linear(4, 4)), ft.OffloadConfig(include_patterns=["0"], gpu_device="host"))


def test_a_value_that_cannot_be_names_the_field_and_the_value(monkeypatch) -> None:
    monkeypatch.setenv("FT_NUM_BLOCKS", "many")
    with pytest.raises(ft.ConfigError, match=r"num_blocks = 'many'"):
        ft.load_config()
