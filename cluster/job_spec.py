"""What a batch job is, and what of it is kept beside its answers from one run to the next."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cluster.batch_size import BatchChoice, CurvePoint
from cluster.items import item_length
from cluster.journal import JournalError, OutputJournal
from cluster.leases import make_batches
from cluster.messages import Budget, Item, JobProgress
from flextensor.config import OffloadConfig


@dataclass(frozen=True)
class JobSpec:
    """What is run, where, and how. task: what ``pack_task`` made. output: the journal. address: a running cluster
    (None: the Ray that this process has, or one of its own). verify: so many items are kept to be run again. threads:
    of torch in each worker; 0: on the host device a fair share of the CPUs."""

    task: str | bytes
    task_options: dict[str, Any]
    output: Path
    config: OffloadConfig
    batch_size: Literal["auto"] | int = 8
    workers: Literal["auto"] | int = "auto"
    device: str = "auto"
    num_gpus: float = 1.0
    budget: Budget = None
    address: str | None = None
    namespace: str = "flextensor"
    verify: int = 0
    checkpoint_seconds: float = 60.0
    coordinator: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 0

    @property
    def events(self) -> Path:
        """The run's event log."""
        return beside(self.output, "events.jsonl")

    @property
    def checkpoints(self) -> Path:
        """How far long items are."""
        return beside(self.output, "checkpoints")

    @property
    def chosen(self) -> Path:
        """The batch size that an earlier run of this job chose."""
        return beside(self.output, "batch-size.json")


def beside(output: Path, ending: str) -> Path:
    """A file of the run's own beside its answers."""
    return output.with_name(f"{output.stem}.{ending}")


@dataclass(frozen=True)
class Work:
    """All items, the journal that takes the answers and has those of earlier runs, and the progress at the start."""

    items: Sequence[Item]
    journal: OutputJournal
    progress: JobProgress
    length: Callable[[Item], int] = item_length

    def batches(self, size: int) -> list[tuple[Item, ...]]:
        """Batches with at least one unfinished item; the same items share one in every run."""
        return [
            batch
            for batch in make_batches(self.items, size, self.length)
            if any(str(item["id"]) not in self.journal.finished for item in batch)
        ]

    @property
    def is_done(self) -> bool:
        """Every item is in the journal."""
        return all(str(item["id"]) in self.journal.finished for item in self.items)


def keep_choice(choice: BatchChoice, path: Path) -> None:
    """For a run that takes the job up: an item shares its batch with the same others then."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(asdict(choice), indent=1) + "\n")
    part.replace(path)


def kept_choice(spec: JobSpec) -> BatchChoice | None:
    if spec.batch_size != "auto" or not spec.chosen.exists():
        return None
    try:
        data = json.loads(spec.chosen.read_text())
        return BatchChoice(int(data["batch_size"]), tuple(CurvePoint(**point) for point in data["curve"]), kept=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JournalError(
            f"{spec.chosen} is not this program's ({error}); remove it, or start anew with --overwrite"
        ) from None


def forget_run(spec: JobSpec) -> None:
    """Remove what an earlier run of the job left beside its answers: they are started anew."""
    spec.chosen.unlink(missing_ok=True)
    shutil.rmtree(spec.checkpoints, ignore_errors=True)
