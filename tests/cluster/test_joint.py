"""Which link each worker has beside the others, and which of two joint plans is better."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from cluster.joint import Link, Load, Outlook, fair_shares, is_better, links_of, score, settle
from cluster.messages import Measurement
from flextensor.profile import TransferCurve


def measured(rank: int, device: str, rate: float, node: str = "a", alone: float = 55e9) -> Measurement:
    return Measurement(rank, node, device, TransferCurve.from_bandwidth(rate), TransferCurve.from_bandwidth(alone))


def test_workers_on_one_gpu_share_what_they_measured_together() -> None:
    links = links_of(
        [
            measured(0, "GPU-1", 30e9),
            measured(1, "GPU-1", 24e9),
            measured(2, "GPU-2", 52e9),
            measured(3, "GPU-1", 50e9, node="b"),
        ]
    )
    assert [link.ranks for link in links] == [(0, 1), (2,), (3,)]
    assert [round(link.even_share / 1e9) for link in links] == [27, 52, 50]


def test_a_shared_link_is_never_more_than_what_one_had_of_it_alone() -> None:
    """Workers that copy little measure the whole link each."""
    (link,) = links_of([measured(0, "GPU-1", 50e9), measured(1, "GPU-1", 52e9)])
    assert link.capacity == pytest.approx(55e9, rel=0.01)


def test_host_devices_have_a_link_each() -> None:
    links = links_of([measured(0, "host", 4e9), measured(1, "host", 2e9)])
    assert [link.ranks for link in links] == [(0,), (1,)] and links[0].capacity > links[1].capacity


ONE_LINK = (Link((0, 1), 10.0),)
UNEVEN = {0: Load(1.0, 16.0), 1: Load(1.0, 4.0)}


def test_independent_replicas_take_what_they_ask_for_at_their_own_pace() -> None:
    """Rank 1 copies 4 a second beside its compute; rank 0 has the other 6, not an even 5."""
    outlook = settle(ONE_LINK, UNEVEN)
    assert outlook.step_seconds[0] == pytest.approx(16 / 6, rel=1e-3)
    assert outlook.step_seconds[1] == pytest.approx(1.0) and outlook.wait(1) == pytest.approx(0.0)


def test_a_lockstep_group_steps_as_fast_as_the_link_carries_all_its_bytes() -> None:
    """Rank 1 waits for rank 0 and asks for less of the link meanwhile: 20 bytes a step of both over 10 a second."""
    outlook = settle(ONE_LINK, UNEVEN, ((0, 1),))
    assert outlook.pace[0] == outlook.pace[1] == pytest.approx(2.0, rel=1e-2)
    assert outlook.wait(1) == pytest.approx(1.0, rel=2e-2)
    alone = settle(ONE_LINK, UNEVEN)
    assert score(outlook, ((0, 1),))[0] < max(alone.step_seconds.values())


def test_a_group_over_several_links_has_one_pace_and_leaves_bytes_to_a_neighbour_of_another_group() -> None:
    links = (Link((0, 2), 10.0), Link((1,), 10.0))
    loads = {0: Load(1.0, 8.0), 1: Load(4.0, 8.0), 2: Load(1.0, 9.0)}
    outlook = settle(links, loads, ((0, 1),))
    assert outlook.pace[0] == outlook.pace[1] == pytest.approx(4.0)
    assert outlook.bandwidth[2] == pytest.approx(8.0, rel=1e-3), "rank 0 takes 8 bytes in 4 s only"
    assert settle(links, loads).bandwidth[2] < 6.0


@settings(deadline=None)
@given(
    some.dictionaries(some.integers(0, 7), some.floats(0, 100), min_size=1),
    some.floats(1, 100),
)
def test_fair_shares_spend_the_link_once_and_starve_nobody(demands: dict[int, float], capacity: float) -> None:
    shares = fair_shares(capacity, demands)
    assert sum(shares.values()) <= capacity * (1 + 1e-9)
    assert all(shares[rank] <= demands[rank] for rank in demands)
    least = [shares[rank] for rank in demands if shares[rank] < demands[rank] * (1 - 1e-9)]
    if least:  # who gets less than it asks for gets as much as anyone, and nothing is left over
        assert min(least) >= max(shares.values()) * (1 - 1e-9) or min(least) == pytest.approx(max(shares.values()))
        assert sum(shares.values()) == pytest.approx(capacity)


@settings(deadline=None)
@given(
    some.lists(some.tuples(some.floats(0.01, 10), some.floats(0, 100)), min_size=2, max_size=6),
    some.floats(1, 50),
    some.booleans(),
)
def test_settled_steps_are_possible_on_their_link(
    rows: list[tuple[float, float]], capacity: float, together: bool
) -> None:
    loads = {rank: Load(*row) for rank, row in enumerate(rows)}
    ranks = tuple(loads)
    lockstep = (ranks,) if together else ()
    outlook = settle((Link(ranks, capacity),), loads, lockstep)
    rate = sum(load.streamed_bytes / outlook.pace[rank] for rank, load in loads.items())
    assert rate <= capacity * 1.05, "more bytes a second than the link has"
    assert all(outlook.pace[rank] >= load.compute_seconds * 0.999 for rank, load in loads.items())
    if together:
        best = max(
            max(load.compute_seconds for load in loads.values()),
            sum(x.streamed_bytes for x in loads.values()) / capacity,
        )
        assert outlook.pace[0] <= best * 1.05, "the slowest one could be faster"


def test_lockstep_counts_its_slowest_and_replicas_count_together() -> None:
    even = Outlook({}, {0: 2.0, 1: 2.0}, {0: 2.0, 1: 2.0})
    uneven = Outlook({}, {0: 1.0, 1: 2.6}, {0: 1.0, 1: 2.6})
    assert is_better(score(even, ((0, 1),)), score(uneven, ((0, 1),)))
    assert is_better(score(uneven), score(even)), "1 + 1 / 2.6 steps a second are more than 2 / 2"
    assert not is_better(score(even), score(even))
