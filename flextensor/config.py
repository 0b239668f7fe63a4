"""OffloadConfig, and where it comes from: file < ``FT_*`` environment < arguments."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

ENV_PREFIX = "FT_"

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*$")


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it, its value and the remedy."""


def parse_bytes(text: str | int | float) -> int:
    """Bytes of ``"24GiB"``, ``"1.5 GB"``, ``"4096"`` or a number.

    Raises ConfigError for anything else.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        return int(text)
    found = _SIZE.match(str(text))
    if found is None or found[2].upper() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; write a number of bytes or, for example, '24GiB'")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def parse_budget(text: str | int | float) -> int | float:
    """A budget: ``"40%"`` -> 0.4 (a float is a fraction of what the caller says), ``"6GiB"`` -> bytes (an int).

    Raises ConfigError for a percentage outside 0..100 and for anything that is no size.
    """
    if isinstance(text, str) and text.strip().endswith("%"):
        try:
            share = float(text.strip()[:-1]) / 100
        except ValueError:
            raise ConfigError(f"{text!r} is not a percentage; write, for example, '40%'") from None
        if not 0 <= share <= 1:
            raise ConfigError(f"budget {text!r} is outside 0% to 100%")
        return share
    if isinstance(text, float) and 0 < text <= 1:
        return text
    size = parse_bytes(text)
    if size < 0:
        raise ConfigError(f"budget {text!r} is negative")
    return size


class OffloadConfig(BaseModel):
    """How a model is offloaded. Names and meanings follow the public FlexTensor library where it has them.

    Sizes are bytes (or text such as ``"6GiB"``), times are seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    enabled: bool = True
    """False: ``offload`` returns the model on the device as a plain module."""
    gpu_device: str | int = "auto"
    """``auto`` (CUDA if there is one, else host), ``cuda``, ``cuda:N``, an index, or ``host``."""
    pinned_memory: bool = True
    """Pin host weights; False copies from pageable memory, several times slower."""
    include_patterns: tuple[str, ...] = ()
    """Globs over module names that make a module a unit (``layers.*``); prefixes ``name:`` and ``class:``."""
    exclude_patterns: tuple[str, ...] = ()
    """Globs over module and parameter names that stay resident; the same prefixes."""
    transfer_mode: Literal["allocation_block_transfer", "raw_block_transfer"] = "allocation_block_transfer"
    """One packed copy a unit from the store, or the unit's tensors as they lie, without a packed host copy."""
    num_blocks: int | None = Field(None, ge=1)
    """The most units whose slots the arena holds at once (None: the planner decides)."""
    min_blocks: int = Field(1, ge=1)
    """The fewest units whose slots the arena holds at once."""
    max_gpu_mem_fraction: float | None = Field(None, gt=0, le=1)
    """None: latency mode (least memory that costs no time). A fraction of device memory: least time within it."""
    budget_bytes: int | None = None
    """Memory mode in bytes of weights on the device (``"6GiB"``); wins over ``max_gpu_mem_fraction``."""
    budget_fraction: float | None = Field(None, gt=0, le=1)
    """Memory mode as a share of the model's own weights; ``budget_bytes`` wins over it."""
    transfer_budget_scale: float = Field(0.95, gt=0)
    """Latency mode: how much of the compute time copies may fill before a tensor is kept resident. What is left of it
    is for a link that is slower at times."""
    discovery_iters: int = Field(1, ge=1)
    skip_discovery: bool = False
    profiling_iters: int = Field(2, ge=1)
    profile_mode: Literal["view", "getter"] = "view"
    """With ``compile_fn``: profile compiled (``view``) or eager (``getter``: ask for a replan afterwards)."""
    external_compile: bool = False
    """The caller compiles ``offload_units()`` himself, after profiling."""
    offload_timing: Literal["off", "eager", "cuda_graph"] = "off"
    profile_storage_dir: str | None = None
    profile_read_only: bool = False
    shm_enabled: bool = False
    """Keep weights in the node's shared host store."""
    shm_namespace: str = "default"
    shm_wait_timeout: float = Field(600.0, gt=0)
    shm_dir: str = "/dev/shm"
    """A tmpfs, or a hugetlbfs."""
    shm_backing: Literal["file", "memfd"] = "file"
    """``memfd``: memory that its processes hand to each other, for where ``shm_dir`` is too small and memory is not."""
    shm_keep: bool = False
    """Leave the store when its last user goes, for a warm start; ``flextensor store rm`` removes it."""
    shm_scrub_share: float = Field(0.0, ge=0, le=0.1)
    """Share of one core's time that checks the shared store against its checksums all the while, unit by unit."""
    enable_diagnostics: bool = False
    """Log (INFO, ``flextensor.diagnostics``) each plan as it comes into force and what its first steps took, visit by
    visit; every step is timed."""
    resident_below_bytes: int = 1 << 20
    """Tensors smaller than this stay resident: a copy of them costs more than their memory."""
    stream_granularity: Literal["unit", "piece"] = "unit"
    """``piece``: a unit's direct children with weights are waited for and released one by one (least memory)."""
    host_memory_bytes: int = 8 << 30
    """The host device's memory."""
    host_link_bytes_per_second: float = Field(4e9, gt=0)
    """The host device's link bandwidth."""

    @field_validator("budget_bytes", "resident_below_bytes", "host_memory_bytes", mode="before")
    @classmethod
    def _sizes(cls, value: Any) -> Any:
        return value if value is None else parse_bytes(value)

    @field_validator("host_link_bytes_per_second", mode="before")
    @classmethod
    def _bandwidth(cls, value: Any) -> Any:
        return parse_bytes(value.removesuffix("/s")) if isinstance(value, str) else value

    @field_validator("include_patterns", "exclude_patterns", mode="before")
    @classmethod
    def _patterns(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    def __init__(self, **settings: Any) -> None:
        unknown = [key for key in settings if key not in type(self).model_fields]
        if unknown:
            raise ConfigError(unknown_key_message(unknown[0], type(self).model_fields))
        try:
            super().__init__(**settings)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{where} = {first['input']!r}: {first['msg']}") from None

    def updated(self, **settings: Any) -> OffloadConfig:
        """A copy with some settings changed, checked like a new one."""
        return OffloadConfig(**{**self.model_dump(), **settings})


def unknown_key_message(key: str, known: Mapping[str, Any] | list[str], what: str = "setting") -> str:
    """``unknown setting 'x'; did you mean 'y'?``"""
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
    return f"unknown {what} {key!r}{hint}"


def load_config_from_file(path: str | Path) -> dict[str, Any]:
    """The settings of a YAML or JSON file, unchecked; an ``offload:`` section is taken where there is one.

    Raises ConfigError when the file is missing, not YAML, or no mapping.
    """
    file = Path(path)
    try:
        data = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config {file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {str(error).splitlines()[0]}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected settings (key: value), found {type(data).__name__}")
    section = data.get("offload", data)
    if not isinstance(section, dict):
        raise ConfigError(f"{file}: 'offload' holds {type(section).__name__}, expected settings")
    return dict(section)


def load_config_from_env(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings given as ``FT_<FIELD>``; lists and None as JSON or, for patterns, separated by commas.

    Raises ConfigError for a misspelt ``FT_`` variable, naming the nearest.
    """
    settings: dict[str, Any] = {}
    for key, text in (os.environ if environ is None else environ).items():
        if not key.startswith(ENV_PREFIX):
            continue
        name = key[len(ENV_PREFIX) :].lower()
        if name not in OffloadConfig.model_fields:
            known = [ENV_PREFIX + field.upper() for field in OffloadConfig.model_fields]
            raise ConfigError(unknown_key_message(key, known, "environment variable"))
        settings[name] = _from_text(name, text)
    return settings


def _from_text(name: str, text: str) -> Any:
    if text.lower() in ("none", "null", ""):
        return None
    if name.endswith("_patterns"):
        return json.loads(text) if text.startswith("[") else [part.strip() for part in text.split(",")]
    return text


def load_config(path: str | Path | None = None, **arguments: Any) -> OffloadConfig:
    """Settings from a file, then ``FT_*`` variables over them, then arguments over both.

    Raises ConfigError, naming the setting, its value and the remedy.
    """
    merged = load_config_from_file(path) if path is not None else {}
    return OffloadConfig(**{**merged, **load_config_from_env(), **arguments})
