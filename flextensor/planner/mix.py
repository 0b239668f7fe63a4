"""Step kinds and their shares: what a plan is made for when steps differ."""

from __future__ import annotations

from collections.abc import Sequence

from flextensor.profile import Profile, StepKind


def kinds_of(profile: Profile) -> tuple[StepKind, ...]:
    """The profile's step kinds; one without any compute where nothing has been measured yet."""
    zeros = (0.0,) * len(profile.visits)
    return profile.kinds or (StepKind("unmeasured", zeros, zeros, zeros),)


def kind_weights(kinds: Sequence[StepKind]) -> list[float]:
    """Shares of the mix, summing to 1; equal shares where all weights are 0."""
    total = sum(kind.weight for kind in kinds)
    return [kind.weight / total if total > 0 else 1 / len(kinds) for kind in kinds]


def resident_seconds(kind: StepKind) -> float:
    """The step with every tensor on the device: compute and gaps, or the host where that is slower."""
    return max(sum(kind.compute) + sum(kind.gap), sum(kind.host))
