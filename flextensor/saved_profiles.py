"""Profiles of a model: made from its weights and measurements, saved, found again, refused when they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flextensor.profile import Profile, ProfileMismatch, StepKind, TensorInfo, TransferCurve, UnitInfo
from flextensor.store import HostStore
from flextensor.units import Unit, Weight


@dataclass(frozen=True)
class Subject:
    """Whose profile it is: the weights in the store's order, what reads them, and the device."""

    weights: Sequence[Weight]
    pieces: Sequence[Unit]
    reads: Sequence[Sequence[int]]
    store: HostStore
    device: str
    other_bytes: int

    @property
    def dtypes(self) -> list[str]:
        """The weights' dtypes."""
        return sorted({str(weight.tensor.dtype) for weight in self.weights})

    def profile(
        self,
        visits: tuple[int, ...] = (),
        kinds: tuple[StepKind, ...] = (),
        curve: TransferCurve | None = None,
        activation_bytes: int = 0,
    ) -> Profile:
        """These measurements as a Profile."""
        stored = self.store.layout.by_name
        return Profile(
            tensors=tuple(
                TensorInfo(
                    weight.name,
                    weight.nbytes,
                    stored[weight.name].offset,
                    keep_resident=bool(weight.resident_reason),
                    reason=weight.resident_reason,
                )
                for weight in self.weights
            ),
            units=tuple(UnitInfo(u.name, tuple(r)) for u, r in zip(self.pieces, self.reads, strict=True)),
            visits=visits,
            kinds=kinds,
            transfer=curve or TransferCurve(()),
            other_bytes=self.other_bytes,
            activation_bytes=max(activation_bytes, 0),
            device=self.device,
            meta={"dtypes": self.dtypes},
        )

    def check(self, saved: Profile, path: str | Path) -> None:
        """Raise ProfileMismatch, naming what differs, when ``saved`` is of another model, dtype or device."""
        if saved.layout_fingerprint != self.profile().layout_fingerprint:
            raise ProfileMismatch(f"{path}: its units and weights are not this model's; profile again")
        for what, theirs, ours in (
            ("device", saved.device, self.device),
            ("dtypes", saved.meta.get("dtypes"), self.dtypes),
        ):
            if theirs != ours:
                raise ProfileMismatch(f"{path}: profiled with {what} {theirs}, this model has {ours}; profile again")

    def storage_path(self, directory: str, name: str) -> Path:
        """Where ``profile_storage_dir`` keeps this model's profile on this device."""
        device = "".join(c if c.isalnum() else "-" for c in self.device)
        return Path(directory) / f"{name}-{device}-{self.profile().layout_fingerprint}.json"
