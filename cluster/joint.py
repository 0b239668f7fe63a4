"""Which link each worker really has, given what all of them measured at the same time. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.messages import Measurement
from flextensor.profile import TransferCurve


def shared_curve(measurement: Measurement) -> TransferCurve:
    """The transfer curve to plan with: the profiled one, slowed (or sped up) to the rate that the worker gets now.

    The rate is the better of two that are both too low at times: the measured one shares the link with the worker's
    own running copies, which a new plan replaces; the live one is of copies that may be small.
    """
    rate = max(measurement.measured.bandwidth, measurement.live_bytes_per_second)
    if rate <= 0:
        return measurement.profiled
    return measurement.profiled.scaled(measurement.profiled.bandwidth / rate)


def shared_curves(measurements: Iterable[Measurement]) -> dict[int, TransferCurve]:
    """``shared_curve`` a rank. Workers on the same device get the same rate: one link serves them in turn."""
    by_device: dict[tuple[str, str], list[Measurement]] = {}
    for one in measurements:
        by_device.setdefault((one.node, one.device), []).append(one)
    curves: dict[int, TransferCurve] = {}
    for (_, device), group in by_device.items():
        own = {one.rank: shared_curve(one) for one in group}
        if device != "host" and len(group) > 1:
            slowest = min(own.values(), key=lambda curve: curve.bandwidth)
            own = dict.fromkeys(own, slowest)
        curves |= own
    return curves
