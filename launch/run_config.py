"""RunConfig: what one ``flextensor generate`` run does. File < ``FT_*`` environment < command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cluster.options import coordinator_settings
from cluster.parquet_files import journal_of
from flextensor.config import (
    ConfigError,
    OffloadConfig,
    load_config_from_env,
    parse_budget,
    unknown_key_message,
)


class RunConfig(BaseModel):
    """One batch job. Paths are absolute after checking; relative ones start at the current directory."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    model: Path
    """A Hugging Face model directory."""
    prompts: Path
    """JSON lines, Parquet or text, by the file's name; see ``launch.items``."""
    output: Path = Path("out/answers.jsonl")
    """JSONL, one answer a line, keyed by the item's id; ``.parquet``: made at the end from the journal beside it."""
    overwrite: bool = False
    """Start the output anew; else ids that it has already are skipped."""
    task: str = "launch.causal_lm:CausalLMTask"
    """``module:name`` of what is done with the items."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings (for text: dtype, max_new_tokens, system_prompt, attention)."""
    batch_size: Literal["auto"] | int = 8
    """Items that a worker takes and runs at once. ``auto``: the workers try several sizes and take the one that brings
    the most tokens a second with the memory that its caches leave for weights."""
    workers: Literal["auto"] | int = "auto"
    """``auto``: one a GPU, and two where there is none."""
    device: Literal["auto", "cuda", "host"] = "auto"
    num_gpus: float = Field(1.0, gt=0)
    """GPUs a worker takes; 0.5 lets two workers share one."""
    budget: int | float | None = None
    """Weights on each device: ``"6GiB"``, or ``"50%"`` of the model's weights; None: latency mode."""
    address: str | None = None
    """A running Ray cluster (``auto``, ``host:port``, ``ray://...``); None starts a local one."""
    namespace: str = Field("flextensor", min_length=1)
    """The run's name: ``status`` and ``replan`` find it by this."""
    checkpoint_seconds: float = Field(60.0, gt=0)
    """So often a batch that takes long keeps how far it is; a worker that takes it up after a death goes on there."""
    verify: int = Field(0, ge=0)
    """So many items are run again on an un-offloaded copy."""
    report: Path | None = Path("out/report.json")
    """Where the run's report goes as JSON (None: only the terminal)."""
    offload: dict[str, Any] = Field(default_factory=dict)
    """Settings of ``flextensor.OffloadConfig``."""
    coordinator: dict[str, Any] = Field(default_factory=dict)
    """Settings of ``cluster.options.CoordinatorOptions``: ``automatic``, ``triggers``, ``lockstep``, ``hang`` ..."""

    @field_validator("model", "prompts", "output", "report", mode="after")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return value if value is None else Path.cwd() / value.expanduser()

    @field_validator("budget", mode="before")
    @classmethod
    def _budget(cls, value: Any) -> Any:
        return None if value is None or value == "" else parse_budget(value)

    @field_validator("workers", "batch_size", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        number = int(value) if isinstance(value, str) and value.isdigit() else value
        if number != "auto" and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ValueError("use 'auto' or a whole number, 1 or more")
        return number

    @field_validator("task", mode="after")
    @classmethod
    def _task(cls, value: str) -> str:
        module, _, name = value.partition(":")
        if not module or not name:
            raise ValueError("write 'module:name'")
        return value

    @field_validator("offload", mode="after")
    @classmethod
    def _offload(cls, value: dict[str, Any]) -> dict[str, Any]:
        OffloadConfig(**value)
        return value

    @field_validator("coordinator", mode="after")
    @classmethod
    def _coordinator(cls, value: dict[str, Any]) -> dict[str, Any]:
        return coordinator_settings(value)

    def __init__(self, **settings: Any) -> None:
        for key in settings:
            if key not in type(self).model_fields:
                raise ConfigError(unknown_key_message(key, type(self).model_fields))
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError(_first_line(error)) from None

    @property
    def journal(self) -> Path:
        """Where answers are written as they come: the output itself, or JSON lines beside a Parquet file."""
        return journal_of(self.output)

    def offload_config(self) -> OffloadConfig:
        """``offload`` as the engine takes it; ``device`` and ``budget`` are the run's and left to the workers."""
        return OffloadConfig(**self.offload)

    def task_settings(self) -> dict[str, Any]:
        """What the task's constructor gets: its options and the model's directory."""
        return {"model": str(self.model), **self.task_options}


def load_run_config(
    path: str | Path | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> RunConfig:
    """A run's settings: the YAML file, then ``FT_*`` over its ``offload``, then ``overrides`` over both.

    ``overrides`` may have dotted keys (``offload.min_blocks``) and nested mappings; a None value is taken as None.

    Raises ConfigError for a file that cannot be read and for a setting that cannot be used.
    """
    data: dict[str, Any] = _read(Path(path)) if path is not None else {}
    data = _merged(data, {"offload": load_config_from_env(environ)})
    for key, value in (overrides or {}).items():
        data = _merged(data, _nested(key, value))
    for key in data:
        if key not in RunConfig.model_fields:
            raise ConfigError(unknown_key_message(key, RunConfig.model_fields))
    for required in ("model", "prompts"):
        if data.get(required) is None:
            raise ConfigError(f"setting {required!r} is missing; give it in the config file or as --{required}")
    return RunConfig(**data)


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """``["offload.min_blocks=2", "task_options.dtype=bfloat16"]`` -> dotted keys and values, values read as YAML.

    Raises ConfigError for a text without ``=`` or a value that is not YAML.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"{text!r} sets nothing; write key=value, for example offload.min_blocks=2")
        try:
            found[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{text!r}: the value is not YAML: {str(error).splitlines()[0]}") from error
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected settings (key: value), found {type(data).__name__}")
    for section in ("offload", "task_options", "coordinator"):
        if data.get(section) is None:
            data.pop(section, None)
    return data


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _first_line(error: ValidationError) -> str:
    first = error.errors()[0]
    where = str(first["loc"][0])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return f"{where}: {cause}"
    return f"{where} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"
