"""How a run's YAML says how its coordinator behaves, and what it is told when that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from cluster.options import TRIGGERS, CoordinatorOptions, coordinator_settings, require_ranks
from flextensor.config import ConfigError


def options(text: str) -> CoordinatorOptions:
    return CoordinatorOptions(namespace="unit", **coordinator_settings(yaml.safe_load(text)))


def test_groups_and_triggers_are_read_from_yaml() -> None:
    read = options("{lockstep: [[0, 1], [2, 3]], triggers: [link, memory], automatic: true, rollback_margin: null}")
    assert read.lockstep == ((0, 1), (2, 3)) and read.triggers == ("link", "memory") and read.automatic
    assert read.group_of(3) == (2, 3) and read.group_of(4) == () and read.rollback_margin is None
    assert options("{}").lockstep == () and options("{}").triggers == TRIGGERS
    assert coordinator_settings({"lockstep": read.lockstep, "triggers": read.triggers}) == {
        "lockstep": read.lockstep,
        "triggers": read.triggers,
    }, "what was read can be read again"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hangs": 3}, "hang"),
        ({"hang": -1}, r"coordinator\.hang = -1: write a number"),
        ({"hang": True}, r"coordinator\.hang = True: write a number, 0 or more"),
        ({"hang": float("nan")}, r"coordinator\.hang = nan"),
        ({"poll": 0}, r"coordinator\.poll = 0: write a number, above 0"),
        ({"automatic": 1}, r"coordinator\.automatic = 1: write true or false"),
        ({"namespace": "x"}, "namespace"),
        ({"triggers": "link"}, "write a list of drift, link"),
        ({"triggers": ["lnik"]}, "link"),
        ({"lockstep": [0, 1]}, r"as \[\[0, 1\], \[2, 3\]\]"),
        ({"lockstep": [[0]]}, "two ranks or more"),
        ({"lockstep": [[0, "a"]]}, "'a' is no rank"),
        ({"lockstep": [[0, 1], [1, 2]]}, "rank 1 is in two groups"),
    ],
)
def test_what_cannot_be_used_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        coordinator_settings(given)


def test_a_group_with_a_rank_that_the_run_does_not_have_is_refused() -> None:
    require_ranks(((0, 1),), range(2))
    with pytest.raises(ConfigError, match=r"names rank 2, but the run has 2 workers \(ranks 0 to 1\)"):
        require_ranks(((0, 2),), range(2))
