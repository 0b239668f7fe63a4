"""Deployments as people make them: real commands, in a sandbox where ``ray stop`` reaches nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.sandbox import Sandbox, missing_for


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    """A machine of the test's own."""
    if reason := missing_for():
        pytest.skip(reason)
    with Sandbox() as made:
        yield made
