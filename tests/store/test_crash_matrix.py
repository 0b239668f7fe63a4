"""Random deaths: who (filler, waiter, user), how (signal) and when are drawn; nothing may go wrong, hang or stay."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.store.holder import Holder

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def _round(directory: str, rng: random.Random) -> dict[str, int]:
    """One round; counts of what happened. Raises AssertionError for a wrong weight, a stuck start or a leak."""
    backing = rng.choice(["file", "file", "memfd"])
    holders: list[tuple[int, Holder]] = []
    counts = {"started": 0, "killed": 0}

    def start() -> None:
        seed = rng.choice([0, 0, 0, 1])
        holders.append((seed, Holder.start(directory, seed, delay=rng.choice([0, 0.005, 0.02]), backing=backing)))
        counts["started"] += 1

    def kill_some(share: float) -> None:
        for item in list(holders):
            if rng.random() < share:
                holders.remove(item)
                item[1].kill(rng.choice(SIGNALS))
                counts["killed"] += 1

    for _ in range(rng.randint(2, 4)):
        start()
    time.sleep(rng.uniform(0, 0.5))
    kill_some(0.5)
    for _ in range(rng.randint(1, 2)):
        start()
    time.sleep(rng.uniform(0, 0.2))
    kill_some(0.3)
    for _, holder in holders:
        assert holder.wait("ready")["wrong"] == []
    kill_some(0.3)
    for _, holder in holders:
        assert holder.ask("check", "checked") == []
    if rng.random() < 0.5:
        kill_some(1.0)
    for _, holder in holders:
        holder.close()
    last = Holder.start(directory, rng.choice([0, 1]), backing=backing)
    assert last.wait("ready")["wrong"] == []
    last.close()
    counts["started"] += 1
    assert os.listdir(directory) == [], "a store was left behind"
    return counts


def run_rounds(directory: str, rounds: int, seed: int) -> dict[str, int]:
    """So many rounds; how many processes were started and killed in all. Raises AssertionError as a round does."""
    free = os.statvfs(directory).f_bfree
    total = {"started": 0, "killed": 0}
    for number in range(rounds):
        counts = _round(directory, random.Random(seed + number))
        total = {key: total[key] + counts[key] for key in total}
    if os.path.ismount(directory):  # else others use this tmpfs too
        lost = (free - os.statvfs(directory).f_bfree) * os.statvfs(directory).f_frsize
        assert lost == 0, f"{lost} bytes of the tmpfs are not free again"
    return total


def test_random_deaths(tmpfs_of_our_own: str) -> None:
    counts = run_rounds(tmpfs_of_our_own, rounds=3, seed=7)
    assert counts["killed"] >= 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_rounds_of_random_deaths(tmpfs_of_our_own: str) -> None:
    counts = run_rounds(tmpfs_of_our_own, rounds=100, seed=1000)
    assert counts["killed"] >= 200
