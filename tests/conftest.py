"""What all tests share: a quiet environment, and which tests this machine can run."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports torch, transformers or Ray: no call leaves the machine, no token is written to the user's
# home, and no thread of OpenMP's spins while it waits for another: on busy cores that was most of a worker's time. Ray
# waits as long as a busy machine takes for the first of its processes: 30 s otherwise.
for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "OMP_WAIT_POLICY": "passive",
    "RAY_gcs_server_port_wait_time_s": "120",
}.items():
    os.environ.setdefault(_name, _value)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in on_gpu:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """``FT_*`` variables of the caller's shell would change what is tested."""
    for name in [name for name in os.environ if name.startswith("FT_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def plans_soon_found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the search for plans that this process makes or has made, but for tests that are marked
    ``whole_search``: most of an engine test's time would go to the last per cent of a toy's step."""
    if request.node.get_closest_marker("whole_search") is None:
        apart, search = (importlib.import_module(f"flextensor.planner.{name}") for name in ("apart", "search"))
        less = search.EFFORT // 10
        monkeypatch.setattr(search, "EFFORT", less)
        told = f"import flextensor.planner.search; sys.modules['flextensor.planner.search'].EFFORT = {less}; "
        monkeypatch.setattr(apart, "_CHILD", apart._CHILD.replace("from flextensor", told + "from flextensor", 1))


@pytest.fixture(scope="session", autouse=True)
def runs_of_this_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run files in a folder of its own: test processes beside each other do not find each other's runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo's model, converted anew, beside what a killed conversion left."""
    from launch.convert import prepare_demo_model

    folder = tmp_path_factory.mktemp("converted")
    (folder / ".SmolLM2.part-killed").mkdir()
    (folder / ".SmolLM2.part-killed" / "model.safetensors").write_bytes(b"half")
    yield prepare_demo_model(folder / "SmolLM2")
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest) -> Path:
    """The demo's model, where the demo has converted it, or else converted now."""
    from launch.convert import DEMO_TARGET, is_model

    there = Path(__file__).parents[1] / DEMO_TARGET
    found: Path = there if is_model(there) else request.getfixturevalue("converted")
    return found
