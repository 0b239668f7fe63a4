"""The Inductor correction. What changes the process is tried in processes of its own."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import codecache, scheduler, tiling_utils
from torch._inductor.utils import sympy_product

from flextensor.compile import correction

PRELUDE = """
import logging, sys, torch
logging.basicConfig(level=logging.WARNING)
from torch import nn
import flextensor as ft
from flextensor.compiled_offload import correction_outcome
torch.set_grad_enabled(False)

class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def config(**settings):
    return ft.OffloadConfig(include_patterns=["layers.*"], gpu_device="host", resident_below_bytes=0, **settings)

def run(**settings):
    model = ft.offload(MyModel(), config(**settings.pop("config", {})), **settings)
    for _ in range(ft.get_offload_manager().iters_before_inference):
        model(torch.randn(2, 32))
    return model
"""


def in_a_new_process(body: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_import_and_eager_offload_leave_inductor_alone() -> None:
    in_a_new_process("""
        assert correction_outcome() is None
        assert "torch._inductor.tiling_utils" not in sys.modules
        run()
        assert correction_outcome() is None
        assert "torch._inductor.tiling_utils" not in sys.modules
    """)


@pytest.mark.parametrize("settings", ["compile_fn=lambda m: m", "config={'external_compile': True}"])
def test_the_first_compiled_offload_forward_applies_it_before_profiling_for_the_rest_of_the_process(settings) -> None:
    in_a_new_process(f"""
        import inspect
        import torch._inductor.tiling_utils as tiling
        before, text = tiling.extract_normalized_read_writes, open(tiling.__file__).read()
        settings = dict({settings})
        model = MyModel()
        weights = {{name: value.clone() for name, value in model.state_dict().items()}}
        ft.offload(model, config(**settings.pop("config", {{}})), **settings)
        assert correction_outcome() is None
        model(torch.randn(2, 32))
        assert ft.get_offload_manager().phase == "profiling"
        assert correction_outcome() == "applied", correction_outcome()
        corrected = tiling.extract_normalized_read_writes
        assert corrected is not before and corrected.__wrapped__ is before
        assert open(tiling.__file__).read() == text
        ft.release()
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        run(compile_fn=lambda m: m)
        ft.release()
        assert tiling.extract_normalized_read_writes is corrected
    """)


def test_a_unit_in_somebody_elses_graph_applies_it() -> None:
    in_a_new_process("""
        model = run()
        assert correction_outcome() is None
        x = torch.randn(2, 32)
        region = torch.compile(lambda x: model.layers[0](x * 0.5) + 1, fullgraph=True, backend="eager")
        expected = model.layers[0](x * 0.5) + 1
        torch.testing.assert_close(region(x), expected)
        assert correction_outcome() == "applied", correction_outcome()
    """)


def test_cache_keys_carry_the_suffix_and_the_callers_tag_stays() -> None:
    in_a_new_process("""
        from torch.compiler import config as compiler_config
        from torch._inductor import codecache
        from flextensor.compile.correction import suffix
        def tag():
            return codecache.FxGraphHashDetails(None, [], {}, []).cache_key_tag
        compiler_config.cache_key_tag = "mine"
        before = tag()
        assert before == "mine"
        with compiler_config.patch(cache_key_tag="inner"):
            run(compile_fn=lambda m: m)
            assert tag() == "inner" + suffix()
        assert tag() == "mine" + suffix()
        assert compiler_config.cache_key_tag == "mine"
    """)


def test_a_graph_that_was_cached_before_the_correction_is_not_reused_after_it(tmp_path: Path) -> None:
    in_a_new_process(f"""
        import os
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = {str(tmp_path)!r}
        torch._inductor.config.cpp.vec_isa_ok = False  # and so no try of what the processor can
        torch._inductor.config.cpp_cache_precompile_headers = False
        from flextensor.compiled_offload import apply_correction
        from torch._dynamo.utils import counters
        x = torch.ones(8)
        def hits():
            torch._dynamo.reset()
            counters.clear()
            torch.compile(lambda x: x * 3 + 1)(x)
            return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        assert [hits() > 0, hits() > 0] == [False, True]
        assert apply_correction() == "applied"
        assert [hits() > 0, hits() > 0] == [False, True]
    """)


def known(inputs, body, n_reads):  # what stands in torch 2.10 to 2.14, in a function that can be looked at
    for _ in (0,):
        # TODO - ... do I need to remap with mutation_real_name
        for inp in inputs:
            for expr in body.get_all_read_expr(inp):
                n_reads[expr].add(inp)


def fixed(inputs, body, n_reads, scheduler):
    for inp in inputs:
        real = scheduler.mutation_real_name.get(inp, inp)
        for expr in body.get_all_read_expr(real):
            n_reads[expr].add(inp)


def fixed_before_the_loop(inputs, body, n_reads, scheduler):
    inputs = [scheduler.mutation_real_name.get(inp, inp) for inp in inputs]
    for _ in (0,):
        for inp in inputs:
            for expr in body.get_all_read_expr(inp):
                n_reads[expr].add(inp)


def only_a_comment(inputs):
    # TODO remap with mutation_real_name
    return inputs


def test_the_source_decides() -> None:
    assert correction.classify(known)[0] == "known"
    assert correction.classify(fixed)[0] == "fixed"
    assert correction.classify(fixed_before_the_loop)[0] == "fixed"
    assert correction.classify(only_a_comment)[0] == "unknown"
    assert correction.classify(len)[0] == "unknown"


@pytest.mark.parametrize(
    ("code", "outcome"), [(fixed, "fixed"), (fixed_before_the_loop, "fixed"), (only_a_comment, "unknown")]
)
def test_fixed_code_is_left_alone_silently_and_unknown_code_with_a_warning(code, outcome, monkeypatch, caplog) -> None:
    monkeypatch.setattr(tiling_utils, "extract_normalized_read_writes", code)
    monkeypatch.setattr(correction, "_outcome", None)
    key_builder = codecache.FxGraphHashDetails.__init__
    assert correction.apply_correction() == correction.correction_outcome() == outcome
    assert tiling_utils.extract_normalized_read_writes is code
    assert codecache.FxGraphHashDetails.__init__ is key_builder
    assert ("unknown form" in caplog.text) is (outcome == "unknown")
    assert len(caplog.records) == (outcome == "unknown")


def test_this_torch_has_the_defect() -> None:
    function = inspect.unwrap(tiling_utils.extract_normalized_read_writes)
    assert correction.classify(function)[0] == "known"


Look = Callable[[scheduler.BaseSchedulerNode], object]


def looked_at(function: Callable[..., torch.Tensor], look: Look) -> list[Any]:
    """What ``look`` finds in each node of the function's graph as the tiling analysis meets it."""
    torch._dynamo.reset()
    seen: list[Any] = []
    codegen = scheduler.Scheduler.codegen

    def look_then_generate(self: scheduler.Scheduler) -> None:
        for node in self.nodes:
            if isinstance(node, scheduler.SchedulerNode | scheduler.FusedSchedulerNode):
                # The analysis serves GPU code generation, which groups nodes by products of sizes, not by sizes.
                device, sizes = group = node.group
                node.group = (device, tuple(sympy_product(size) for size in sizes))
                seen.append(look(node))
                node.group = group
        codegen(self)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(scheduler.Scheduler, "codegen", look_then_generate)
        with torch._inductor.config.patch(fx_graph_cache=False):
            torch.compile(function, fullgraph=True)(torch.randn(64, 64), torch.randn(64, 64))
    return seen


def weight_first(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As in a unit: its weight is said to be mutated, and then read."""
    torch.ops.tiling_test.touch([weight])
    return (weight.t() * 2.0 + x).relu()


def output_last(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As around a unit: its output is said to be mutated, and then read."""
    y = (x * 0.5 + weight.t()).relu()
    torch.ops.tiling_test.touch([y])
    return y + 1


@pytest.fixture
def touch() -> Iterator[None]:
    """An op that says that it mutates what it is given."""
    library = torch.library.Library("tiling_test", "DEF")
    library.define("touch(Tensor(a!)[] weights) -> ()")
    library.impl("touch", lambda weights: None, "CompositeExplicitAutograd")
    torch.library.register_fake("tiling_test::touch", lambda weights: None, lib=library)
    yield
    library._destroy()


def analysis(*, corrected: bool) -> Callable[..., Any]:
    """The reads and writes that the tiling analysis starts from."""
    original = inspect.unwrap(tiling_utils.extract_normalized_read_writes)
    return correction.corrected(original, correction.classify(original)[1]) if corrected else original


def test_the_tiling_analysis_loses_a_mutated_weights_read_without_the_correction(touch: None) -> None:
    def names(*, corrected: bool) -> list[set[str]]:
        find = analysis(corrected=corrected)
        return looked_at(weight_first, lambda node: {name for some in find(node).reads.values() for name in some})

    without, with_it = names(corrected=False), names(corrected=True)
    assert len(without) == len(with_it) == 1
    assert len(with_it[0]) == 2, "the weight and the activation"
    assert len(without[0]) == 1, "the activation alone"


@pytest.mark.parametrize("function", [weight_first, output_last])
def test_what_is_mutated_counts_with_its_size(touch: None, function, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores that a tiling is chosen by: bytes read and written along each loop."""
    score = getattr(tiling_utils, "_analyze_memory_coalescing", None) or tiling_utils.analyze_memory_coalescing

    def scores(*, corrected: bool) -> list[int]:
        monkeypatch.setattr(tiling_utils, "extract_normalized_read_writes", analysis(corrected=corrected))
        return looked_at(function, lambda node: sum(score(node).coalesced_by_var.values()))

    read_once = 64 * 64 * 4
    lost = [more - less for more, less in zip(scores(corrected=True), scores(corrected=False), strict=True)]
    assert sum(lost) == read_once and max(lost) == read_once
