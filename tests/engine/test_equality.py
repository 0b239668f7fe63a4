"""The same numbers as the un-offloaded model, from the first call on, in every phase and across replans."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flextensor as ft
from tests.engine.conftest import MakePair, PaceLink
from tests.engine.harness import noise
from tests.engine.models import Alternating, Block, Blocks, Linears, MixedDtypes, TiedLM


def test_blocks_through_every_phase_and_replans(pair: MakePair) -> None:
    pair(Blocks(), noise(3, 48)).through_everything()


@pytest.mark.parametrize("patterns", [("linears.*",), ("norms.*",), ("linears.*", "norms.*")])
def test_patterns_that_match_only_some_kinds_of_layer(
    pair: MakePair, pace_link: PaceLink, patterns: tuple[str, ...]
) -> None:
    only_norms = patterns == ("norms.*",)
    pace_link(5e7)
    one = pair(
        Alternating(width=64),
        noise(1, 64),
        patterns=patterns,
        budget=0.99 if only_norms else 0.6,
        resident_below_bytes=16,
        link=5e7,
    )
    one.to_inference()
    one.streams(5)
    one.replan(one.least())
    one.streams(5)


def test_mixed_dtypes_in_one_unit(pair: MakePair) -> None:
    one = pair(MixedDtypes(), noise(2, 33), budget=0.6)
    one.through_everything()
    assert len(one.manager.profile.meta["dtypes"]) == 6


def test_units_a_hundred_times_larger_than_others(pair: MakePair) -> None:
    model = Blocks(inner=[3, 700, 4, 5, 650, 3, 7])
    one = pair(model, noise(2, 48), budget=0.7)
    one.through_everything()


def test_small_weights_stay_resident(pair: MakePair) -> None:
    one = pair(Blocks(width=64, inner=256), noise(2, 64), budget=0.6, resident_below_bytes=4096)
    one.to_inference()
    one.streams(3)
    plan = one.manager.plan
    sizes = {at: weight.nbytes for at, weight in enumerate(one.manager._weights)}
    assert plan.offsets and all(sizes[at] >= 4096 for at in plan.offsets)
    assert all(at in plan.resident for at, size in sizes.items() if size < 4096)


def test_default_threshold_keeps_weights_under_a_mebibyte_resident(pair: MakePair) -> None:
    threshold = ft.OffloadConfig().resident_below_bytes
    assert threshold == 1 << 20
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 511, bias=False), nn.Linear(511, 513))
    one = pair(
        model,
        noise(1, 512),
        patterns=("0", "1", "2"),
        budget=(3 << 20) + 512,
        resident_below_bytes=threshold,
        under_model=False,
    )
    one.to_inference()
    reasons = {weight.name: weight.resident_reason for weight in one.manager._weights}
    assert reasons["0.weight"] == "" and "smaller" in reasons["1.weight"] and "smaller" in reasons["2.bias"]


@pytest.mark.parametrize("mode", ["allocation_block_transfer", "raw_block_transfer"])
def test_both_transfer_modes(pair: MakePair, mode: str) -> None:
    pair(Blocks(count=4), noise(2, 48), transfer_mode=mode).through_everything()


def test_one_unit_alone(pair: MakePair) -> None:
    one = pair(Blocks(count=1), noise(2, 48), budget=None, under_model=False)
    one.to_inference()
    one.run(3)
    one.replan(None)


def test_prefill_and_decode_share_one_plan(pair: MakePair) -> None:
    one = pair(
        TiedLM(),
        lambda i: torch.randint(0, 300, (2, 9 + i)),
        patterns=("embed", "layers.*", "head"),
        budget=0.7,
        offload_timing="eager",
    )
    one.to_inference()
    before, epoch = one.copied, one.manager.epoch
    for length in (5, 17, 8):
        tokens = torch.randint(0, 300, (2, length), device=one.device)
        assert torch.equal(one.model.generate(tokens, 6), one.reference.generate(tokens, 6))
    live = one.manager.live()
    assert live.unforeseen_visits == 0 and one.manager.epoch == epoch and one.copied > before
    kinds = one.manager.report()["step_kinds"]
    assert len(kinds) >= 3 and kinds["rows<=2"] == 18, kinds
    one.manager.collect_offload_timing()
    assert {step.kind for step in one.manager.sampled_steps()} == {"rows<=2", "rows<=16", "rows<=64"} < set(kinds)
    one.replan(0.7)
    profile, plan = one.manager.profile, one.manager.plan
    mix = {kind.name: kind.weight for kind in profile.kinds}
    assert mix == {name: pytest.approx(count / sum(kinds.values())) for name, count in kinds.items()}
    assert set(plan.prediction.by_kind) == set(mix)
    weighed = sum(mix[name] * seconds for name, seconds in plan.prediction.by_kind.items())
    assert plan.prediction.step_seconds == pytest.approx(weighed)
    tokens = torch.randint(0, 300, (1, 11), device=one.device)
    assert torch.equal(one.model.generate(tokens, 6), one.reference.generate(tokens, 6))


def test_batches_and_shapes_other_than_profiled(pair: MakePair) -> None:
    sizes = [1, 1, 1, 8, 1, 32, 2]
    one = pair(Blocks(), lambda i: torch.randn(sizes[i % len(sizes)], 48))
    one.to_inference()
    one.streams(10)
    one.replan(None)
    one.replan(0.5, calls=8)


@pytest.mark.parametrize("first", [1, 8])
def test_profiled_with_one_batch_then_run_with_another_then_replanned(pair: MakePair, first: int) -> None:
    one = pair(Blocks(), lambda i: torch.randn(first if i < 5 else 9 - first, 48), offload_timing="eager")
    one.to_inference()
    one.run(3)
    kinds = {kind.name for kind in one.manager.profile.kinds}
    one.streams(8)
    one.replan(one.budget)
    assert {kind.name for kind in one.manager.profile.kinds} - kinds, "the new batch size was not profiled"
    one.streams(3)


def test_skipped_discovery(pair: MakePair) -> None:
    pair(Blocks(), noise(2, 48), skip_discovery=True, resident_below_bytes=8192).through_everything()


def test_several_iterations_of_discovery_and_profiling(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48), discovery_iters=3, profiling_iters=4)
    assert one.manager.iters_before_inference == 7
    one.run(6)
    assert one.manager.phase == "profiling"
    one.run(1)
    assert one.manager.phase == "inference"
    one.streams(3)


def test_keyword_and_nested_arguments_and_outputs(pair: MakePair) -> None:
    class Fancy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Wrapped() for _ in range(4))

        def forward(self, x: torch.Tensor, extra: dict[str, torch.Tensor]) -> dict[str, object]:
            for layer in self.layers:
                x, seen = layer(x=x, extra=(extra,))
            return {"x": x, "seen": [seen, None]}

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(40, 77)

        def forward(self, *, x: torch.Tensor, extra: tuple[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, object]:
            return self.block(x) + extra[0]["add"], {"mean": x.mean()}

    one = pair(Fancy(), lambda i: (torch.randn(3, 40), {"add": torch.randn(40)}))
    one.through_everything()


def test_a_module_that_is_called_through_another_method(pair: MakePair) -> None:
    """Units that are called without the root: each outermost call order is right, whatever the phase."""
    one = pair(Blocks(count=4), noise(2, 48))
    for calls in range(3):
        for _ in range(3):
            x, y = (torch.randn(2, 48, device=one.device) for _ in range(2))
            for at in (0, 1, 2, 3, 1):
                mine, x_theirs = one.model.layers[at](x), one.reference.layers[at](x)
                one.compare(mine, x_theirs)
                one.compare(one.model.layers[at](y), one.reference.layers[at](y))
                x = mine
        if calls == 0:
            one.to_inference()
        elif calls == 1:
            one.replan(one.least())


def test_linear_units_of_every_count(pair: MakePair) -> None:
    for count in range(2, 8):
        one = pair(Linears([40 + 8 * i for i in range(count + 1)]), noise(2, 40), budget=None)
        one.to_inference()
        one.replan(one.least())
        one.run(3)
