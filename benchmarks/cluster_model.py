"""What the workers of the cluster benchmark run: the engine model and a random Llama, as tasks of ``cluster``.

Weights come from a source with a cheap identity, so that only the process that fills the node's store makes numbers,
and no process holds a copy of its own.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import flextensor
from benchmarks.model import BANK_SHIFT, WINDOW_STEP, Shape, Stack, make_input
from cluster.messages import Item
from cluster.task import TaskContext
from flextensor.measure import measure_curve
from flextensor.store.errors import StoreError
from flextensor.store.filling import Reader, move
from flextensor.store.layout import Layout, StoredTensor
from launch.meta_model import parameters_on_meta

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
WARM_UP_STEPS = 8
RUN_AHEAD = 2
"""Steps that the host may have queued and the device not done; a GPU is never idle for it."""
LLAMA_WIDTH, LLAMA_HIDDEN, LLAMA_VOCABULARY = 2048, 8192, 8192


class BankSource:
    """Random weights that are windows into one bank of numbers, as those of ``benchmarks.model``; norms are ones."""

    def __init__(self, model: nn.Module, label: str, seed: int = 0) -> None:
        self._forms = {
            name: (at, tuple(weight.shape), weight.dtype) for at, (name, weight) in enumerate(model.named_parameters())
        }
        self._label, self._seed = label, seed
        self._bank: torch.Tensor | None = None

    def check(self, layout: Layout) -> None:
        """Raises StoreError for a weight that the model does not have."""
        for tensor in layout.tensors:
            if tensor.name not in self._forms:
                raise StoreError(f"weight {tensor.name!r} is not one of the benchmark's model {self._label!r}")

    def identity(self, layout: Layout) -> str:
        rows = [(tensor.name, self._forms[tensor.name]) for tensor in layout.tensors]
        return hashlib.sha256(repr((self._label, self._seed, rows)).encode()).hexdigest()

    def open(self, tensor: StoredTensor) -> tuple[Reader, bool]:
        at, shape, dtype = self._forms[tensor.name]
        count = 1
        for size in shape:
            count *= size
        if len(shape) == 1:
            values = torch.ones(count, dtype=dtype)
        else:
            start = at * WINDOW_STEP % BANK_SHIFT
            values = self._numbers(dtype)[start : start + count]
        raw = values.view(torch.uint8)

        def read(target: torch.Tensor, start: int) -> None:
            move(target, raw[start : start + target.numel()])

        return read, True

    def check_unchanged(self) -> None:
        """Numbers from a seed do not change."""

    def _numbers(self, dtype: torch.dtype) -> torch.Tensor:
        if self._bank is None:
            sizes = [torch.Size(shape).numel() for _, shape, _ in self._forms.values()]
            numbers = torch.Generator().manual_seed(self._seed)
            self._bank = torch.randn(max(sizes) + BANK_SHIFT, generator=numbers).mul_(0.02).to(dtype)
        return self._bank


@dataclass(frozen=True)
class Sampling:
    """What one run of an item adds to its result. stamps: Unix times at which its steps began. epochs: in force when
    they did; a step that changes plans does so after its stamp."""

    stamps: list[float] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    def note(self, epoch: int) -> None:
        """A step begins."""
        self.stamps.append(time.time())
        self.epochs.append(epoch)

    def clear(self) -> None:
        """Forget all."""
        self.stamps.clear()
        self.epochs.clear()

    def take(self) -> dict[str, Any]:
        """Both so far, the stamps rounded to 0.1 ms; nothing is left afterwards."""
        taken = {"stamps": [round(stamp, 4) for stamp in self.stamps], "epochs": list(self.epochs)}
        self.clear()
        return taken


class BenchmarkTask:
    """Options: see the subclasses. Items: ``seed`` and ``steps``; ``fresh`` forgets timing samples before the item;
    ``link`` sets the host device's link (bytes a second) from now on; ``copies`` measures the link instead of steps."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self._manager: Any = None
        self._model: Any = None
        self._sampling = Sampling()

    def build(self) -> tuple[nn.Module, str]:
        """The model with its parameters on meta, and the pattern of its units."""
        raise NotImplementedError

    def make_input(self, item: Item, device: torch.device) -> torch.Tensor:
        """The first step's input, on the device."""
        raise NotImplementedError

    def compute(self, model: Any, x: torch.Tensor, steps: int) -> torch.Tensor:
        """``steps`` forwards; the output, on the CPU."""
        raise NotImplementedError

    def load(self, context: TaskContext) -> None:
        model, pattern = self.build()
        model.requires_grad_(False).eval()
        source = BankSource(model, f"{type(self).__name__} {sorted(self.options.items())}")
        config = context.config.updated(include_patterns=(pattern,))
        self._model = flextensor.offload(model, config, name=context.manager_name, source=source)
        self._manager = flextensor.get_offload_manager(context.manager_name)
        self._manager.on_step_boundary(lambda step: self._sampling.note(self._manager.epoch))

    def warm_up(self, items: Sequence[Item]) -> None:
        while self._manager.phase != "inference":
            self._run_one({"id": "warm-up", "seed": 0, "steps": WARM_UP_STEPS})

    def run(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        return [self._run_one(item) for item in items]

    def _run_one(self, item: Item) -> dict[str, Any]:
        if "link" in item:
            self._manager.device.link.bytes_per_second = float(item["link"])
        if "copies" in item:
            return self._measure_link(item)
        if item.get("fresh"):
            self._manager.reset_offload_timing()
        self._sampling.clear()
        steps = int(item["steps"])
        with torch.inference_mode():
            x = self.make_input(item, self._manager.device.torch_device)
            began, counted = time.time(), time.perf_counter()
            output = self.compute(self._model, x, steps)
        seconds, finished = time.perf_counter() - counted, time.time()
        return {
            "id": item["id"],
            "seed": item["seed"],
            "digest": hashlib.sha256(output.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
            "tokens": steps,
            "seconds": seconds,
            "pid": os.getpid(),
            "began": began,
            "finished": finished,
            **self._sampling.take(),
        }

    def _measure_link(self, item: Item) -> dict[str, Any]:
        """Transfer curves with copies of up to ``copies`` bytes, one after the other from the Unix time ``at`` for
        ``seconds``; each with when it began and ended. profile: the curve that the manager has in its profile."""
        device, store = self._manager.device, self._manager.hosting.store
        largest = store.source(max(store.layout.tensors, key=lambda tensor: tensor.nbytes).name)[: int(item["copies"])]
        scratch, stream = device.allocate(largest.numel()), device.new_stream()
        curves: list[tuple[float, float, tuple[tuple[int, float], ...]]] = []
        time.sleep(max(float(item["at"]) - time.time(), 0.0))
        began = time.time()
        while not curves or time.time() < began + float(item["seconds"]):
            before = time.time()
            curve = measure_curve(device, stream, lambda nbytes: largest[:nbytes], scratch, repeats=1)
            curves.append((before, time.time(), curve.points))
        told = {"curves": curves, "profile": self._manager.profile.transfer.points}
        return {"id": item["id"], "began": began, "finished": time.time(), **told}

    def verify(self, items: Sequence[Item], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Against the same model, resident. Needs room for it on the device."""
        device = self._manager.device.torch_device
        twin, _ = self.build()
        source = BankSource(twin, "twin")
        twin.requires_grad_(False).eval()
        for name, parameter in list(twin.named_parameters()):
            owner = twin.get_submodule(name.rpartition(".")[0])
            data = torch.empty(parameter.shape, dtype=parameter.dtype)
            reader, _ = source.open(_Named(name))  # type: ignore[arg-type]
            reader(data.view(-1).view(torch.uint8), 0)
            setattr(owner, name.rpartition(".")[2], nn.Parameter(data, requires_grad=False))
        twin.to(device)
        different = []
        for item, result in zip(items, results, strict=True):
            with torch.inference_mode():
                output = self.compute(twin, self.make_input(item, device), int(item["steps"]))
            raw = output.contiguous().view(torch.uint8).numpy().tobytes()
            if hashlib.sha256(raw).hexdigest() != result["digest"]:
                different.append(str(item["id"]))
        return {"checked": len(items), "identical": len(items) - len(different), "different": different}

    def describe(self) -> dict[str, Any]:
        return dict(self.options)


@dataclass(frozen=True)
class _Named:
    name: str


class StackTask(BenchmarkTask):
    """The engine model. Options: blocks, width, hidden, heads, dtype, tokens. A step is one forward of ``tokens``, of
    the item's where it has some."""

    def build(self) -> tuple[nn.Module, str]:
        with parameters_on_meta():
            return Stack(self._shape()), "layers.*"

    def _shape(self) -> Shape:
        sizes = {key: int(self.options[key]) for key in ("blocks", "width", "hidden", "heads")}
        return Shape(**sizes, dtype=DTYPES[self.options["dtype"]])

    def make_input(self, item: Item, device: torch.device) -> torch.Tensor:
        tokens = int(item.get("tokens", self.options["tokens"]))
        return make_input(self._shape(), tokens, device, seed=int(item["seed"]))

    def compute(self, model: Any, x: torch.Tensor, steps: int) -> torch.Tensor:
        done: list[torch.cuda.Event] = []
        for step in range(steps):
            if x.is_cuda and step >= RUN_AHEAD:
                done[step - RUN_AHEAD].synchronize()  # so that the times at which steps begin say how long they take
            y = model(x)
            x = y / y.float().pow(2).mean().sqrt().to(y.dtype)  # a denoising loop's step: of one size
            if x.is_cuda:
                done.append(torch.cuda.Event())
                done[-1].record()
        return x.cpu()


class LlamaTask(BenchmarkTask):
    """A random Llama that decodes greedily. Options: layers, width, hidden, heads, vocabulary, dtype, prompt (tokens).
    A step is one forward: the prompt's, then one a token."""

    def build(self) -> tuple[nn.Module, str]:
        from transformers import AutoModelForCausalLM, LlamaConfig

        options = self.options
        config = LlamaConfig(
            hidden_size=int(options["width"]),
            intermediate_size=int(options["hidden"]),
            num_hidden_layers=int(options["layers"]),
            num_attention_heads=int(options["heads"]),
            num_key_value_heads=max(1, int(options["heads"]) // 4),
            vocab_size=int(options["vocabulary"]),
            max_position_embeddings=16384,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[options["dtype"]], attn_implementation="sdpa")
        return model, "model.layers.*"

    def make_input(self, item: Item, device: torch.device) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(int(item["seed"]))
        shape = (1, int(self.options["prompt"]))
        return torch.randint(1, int(self.options["vocabulary"]), shape, generator=numbers).to(device)

    def compute(self, model: Any, x: torch.Tensor, steps: int) -> torch.Tensor:
        from transformers import DynamicCache

        tokens, cache, made = x, DynamicCache(), []
        for _ in range(steps):
            logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1]
            tokens = logits.argmax(-1, keepdim=True)
            made.append(tokens.item())  # a text job reads each token
        return torch.tensor(made)


def stack_options(*, cuda: bool, tokens: int) -> dict[str, Any]:
    """The full engine model on CUDA, a small one on the host device."""
    if cuda:
        return {"blocks": 24, "width": 4096, "hidden": 14336, "heads": 32, "dtype": "bfloat16", "tokens": tokens}
    return {"blocks": 8, "width": 256, "hidden": 896, "heads": 4, "dtype": "float32", "tokens": tokens}


def llama_options(*, cuda: bool, gib: float) -> dict[str, Any]:
    """A Llama of about ``gib`` GiB: bf16 on CUDA; on the host device a narrow one in float32."""
    width, hidden, size = (LLAMA_WIDTH, LLAMA_HIDDEN, 2) if cuda else (256, 768, 4)
    vocabulary = LLAMA_VOCABULARY if cuda else 512
    layer = (2.5 * width * width + 3 * width * hidden) * size
    layers = max(4, round((gib * 2**30 - 2 * vocabulary * width * size) / layer))
    return {
        "layers": layers,
        "width": width,
        "hidden": hidden,
        "heads": 16 if cuda else 4,
        "vocabulary": vocabulary,
        "dtype": "bfloat16" if cuda else "float32",
        "prompt": 64 if cuda else 8,
    }


TASKS: dict[str, Callable[[dict[str, Any]], BenchmarkTask]] = {"stack": StackTask, "llama": LlamaTask}
