"""Which link each worker really has, given what all of them measured at the same time. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.messages import Measurement
from flextensor.profile import TransferCurve

HOST_DEVICE = "host"


def shared_curves(measurements: Iterable[Measurement]) -> dict[int, TransferCurve]:
    """The transfer curve to plan with, a rank. Workers on the same GPU get the slowest one of theirs.

    One link serves them in turn, so what one got beyond its share is what another lacked. Host devices have a link
    each.
    """
    by_device: dict[tuple[str, str], list[Measurement]] = {}
    for one in measurements:
        own = f"{HOST_DEVICE} of {one.rank}" if one.device == HOST_DEVICE else one.device
        by_device.setdefault((one.node, own), []).append(one)
    curves: dict[int, TransferCurve] = {}
    for group in by_device.values():
        slowest = min((one.transfer for one in group), key=lambda curve: curve.bandwidth)
        curves |= {one.rank: slowest for one in group}
    return curves
