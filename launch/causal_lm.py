"""Text generation with a Hugging Face causal LM: the task that ``flextensor generate`` runs in each worker."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.messages import Item
from cluster.task import TaskContext
from flextensor.config import OffloadConfig, unknown_key_message
from launch.compile_choice import CompileChoice
from launch.model_files import TaskInputError, stored_tensors

if TYPE_CHECKING:
    import torch

    from launch.static_cache import StaticCaches

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
CACHES = ("dynamic", "static")
WARM_UP_ITEM: Item = {"id": "warm-up", "prompt": "Name three rivers of Europe."}
_WARM_UP_NEW_TOKENS = 8


@dataclass(frozen=True)
class CausalLMOptions:
    """model: a local Hugging Face directory with safetensors.

    dtype: ``auto`` is float32 on the host device and the checkpoint's own on CUDA.
    max_new_tokens: the most tokens that an answer has.
    batch_size: the most items that go through the model at once; 0 takes all that ``run`` is given.
    system_prompt: put before each conversation that has no system message of its own; empty: the chat template's own.
    attention: transformers' attention implementation.
    cache: ``dynamic`` grows with the text, ``static`` has a fixed size (see ``launch.static_cache``).
    compile, compile_backend, compile_mode: see ``CompileChoice``; they need the static cache, since a growing one
        would be compiled again and again.
    """

    model: str
    dtype: str = "auto"
    max_new_tokens: int = 128
    batch_size: int = 0
    system_prompt: str = ""
    attention: str = "sdpa"
    cache: str = "dynamic"
    compile: str = "none"
    compile_backend: str = "inductor"
    compile_mode: str = ""

    @staticmethod
    def parse(options: Mapping[str, Any]) -> CausalLMOptions:
        """Checked options.

        Raises TaskInputError that names the option, its value and what is allowed, or the nearest known option.
        """
        known = [field.name for field in dataclasses.fields(CausalLMOptions)]
        for key in options:
            if key not in known:
                raise TaskInputError(unknown_key_message(key, known, "task option"))
        if not isinstance(options.get("model"), str | Path) or not str(options["model"]):
            raise TaskInputError("task option 'model' is missing; name a Hugging Face model directory")
        parsed = CausalLMOptions(**{**options, "model": str(options["model"])})
        _one_of("dtype", parsed.dtype, DTYPES)
        _one_of("attention", parsed.attention, ATTENTION)
        _one_of("cache", parsed.cache, CACHES)
        if CompileChoice.parse(options).compiles and parsed.cache != "static":
            raise TaskInputError(f"task option compile = {parsed.compile!r} needs cache = 'static'")
        _whole("max_new_tokens", parsed.max_new_tokens, 1)
        _whole("batch_size", parsed.batch_size, 0)
        if not isinstance(parsed.system_prompt, str):
            raise TaskInputError(f"task option system_prompt = {parsed.system_prompt!r} is not text")
        return parsed


def _one_of(option: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise TaskInputError(f"task option {option} = {value!r}; use one of {', '.join(allowed)}")


def _whole(option: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TaskInputError(f"task option {option} = {value!r}; use a whole number, {least} or more")


@dataclass(frozen=True)
class _Encoded:
    """An item as the model sees it. ``error`` says why it cannot be run (then ``text`` is empty)."""

    item: Item
    text: str = ""
    error: str = ""


class CausalLMTask:
    """Greedy decoding with a KV cache, items batched with left padding. See ``cluster.task.Task``.

    Raises TaskInputError for wrong options and for a model directory that cannot be used.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = CausalLMOptions.parse(options)
        self.choice = CompileChoice.parse(options)
        self.directory = Path(self.options.model)
        stored_tensors(self.directory)  # missing or cut files are told before anything is started
        self._model: Any = None
        self._manager: Any = None
        self._copy: Any = None
        self._caches: dict[int, StaticCaches] = {}
        self._tokenizer: Any = None
        self._generation: Any = None
        self._dtype: torch.dtype | None = None
        self._pattern: tuple[str, ...] = ()
        self._loaded_from = ""

    def load(self, context: TaskContext) -> None:
        """Build the model on meta, and offload it with its weights straight from safetensors."""
        import flextensor
        from flextensor.store import SafetensorsSource
        from launch.meta_model import NeedsTransformers, build_on_meta, read_config, repeated_block_pattern

        context.progress("reading the tokenizer")
        config = read_config(self.directory)
        self._tokenizer = _load_tokenizer(self.directory)
        self._dtype = self._resolve_dtype(context.config, config)
        source: SafetensorsSource | None
        try:
            built = build_on_meta(self.directory, self._dtype, self.options.attention)
            model: Any = built.model
            source = SafetensorsSource(self.directory, built.names, self._dtype)
            self._loaded_from = "safetensors"
        except NeedsTransformers as reason:
            logger.warning("%s: loaded through transformers, with a second host copy while loading", reason)
            context.progress(f"loading through transformers ({reason})")
            model, source = self._load_whole(), None
            self._loaded_from = f"transformers: {reason}"
        offload = self.choice.offload_config(self._with_pattern(context, repeated_block_pattern(model)))
        self._generation = _greedy(self.directory, config, self._tokenizer, self.options.max_new_tokens)
        model.generation_config = self._generation
        context.progress("loading weights")
        self._model = flextensor.offload(
            model,
            offload,
            self.choice.compile_fn(),
            name=context.manager_name,
            source=source,
            progress=lambda progress: context.progress(str(progress)),
        )
        self._manager = flextensor.get_offload_manager(context.manager_name)
        self._allow_graphs()

    def warm_up(self, items: Sequence[Item]) -> None:
        """Generate from the items, prefill and decode, until the manager has its first plan."""
        import flextensor

        batch = [item for item in items if not self._encode(item).error] or [WARM_UP_ITEM]
        for _ in range(self._manager.iters_before_inference + 1):
            if self._manager.phase == "inference":
                break
            self._warm_up_once(batch)
        if self._manager.phase != "inference":
            raise flextensor.OffloadError(f"no plan after {self._manager.iters_before_inference} steps of warm-up")
        for _ in range(self.choice.compile_externally(self._manager)):
            if self._manager.strategy_replan_status.state == "in_progress":
                self._warm_up_once(batch)
        self.choice.require_replanned(self._manager)
        if self.choice.compiles:
            self._warm_up_once(batch)  # prefill and decode both compiled, whichever step came last

    def _warm_up_once(self, items: Sequence[Item]) -> None:
        self._generate(self._model, items, min(_WARM_UP_NEW_TOKENS, self.options.max_new_tokens))

    def run(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """``{"id", "prompt", "answer", "tokens", "finish"}`` an item; ``tokens``: the new ids, the end token included.

        ``finish`` is ``eos`` or ``length``. An item that cannot be run has ``error`` in place of the last three.
        """
        return [result for batch in self._batches(items) for result in self._generate(self._model, batch)]

    def verify(self, items: Sequence[Item], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Run the items in the same batches on an un-offloaded copy: ``{"checked", "identical", "different": [ids]}``.

        ``items`` in the order in which ``run`` had them: padding may move the last bit of a logit. Takes memory for
        the whole model, from the first call until the task ends.
        """
        given = {str(result["id"]): result for result in results}
        if self._copy is None:
            self._copy = self._load_whole().to(self._torch_device())
            self._copy.generation_config = self._generation
            units = (*self._manager.offload_units(), *self._manager.resident_units())
            self.choice.compile_modules(self._copy.get_submodule(name) for name, _ in units)
            self._allow_graphs()
        different: list[str] = []
        checked = 0
        for batch in self._batches(items):
            for result in self._generate(self._copy, batch):
                checked += 1
                if result.get("tokens") != given[str(result["id"])].get("tokens"):
                    different.append(str(result["id"]))
        return {"checked": checked, "identical": checked - len(different), "different": different}

    def describe(self) -> dict[str, Any]:
        """The model and how it is run; sizes in bytes."""
        described: dict[str, Any] = {
            "model": self.directory.name,
            "max_new_tokens": self.options.max_new_tokens,
            "attention": self.options.attention,
            "cache": self.options.cache,
            "compile": dataclasses.asdict(self.choice),
            "include_patterns": list(self._pattern),
            "loaded_from": self._loaded_from,
        }
        if self._model is not None:
            parameters = sum(parameter.numel() for parameter in self._model.parameters())
            described |= {
                "class": type(self._model).__name__,
                "dtype": str(self._dtype).removeprefix("torch."),
                "parameters": parameters,
            }
        return described

    def _batches(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        size = self.options.batch_size or len(items) or 1
        for at in range(0, len(items), size):
            yield items[at : at + size]

    def _resolve_dtype(self, offload: OffloadConfig, config: Any) -> torch.dtype:
        import torch

        if self.options.dtype != "auto":
            dtype: torch.dtype = getattr(torch, self.options.dtype)
            return dtype
        on_cuda = offload.gpu_device != "host" and torch.cuda.is_available()
        stored = getattr(config, "dtype", None)
        return stored if on_cuda and isinstance(stored, torch.dtype) else torch.float32

    def _with_pattern(self, context: TaskContext, found: str | None) -> OffloadConfig:
        config = context.config
        if not config.include_patterns:
            if found is None:
                raise TaskInputError(
                    f"{self.directory}: the model has no list of repeated blocks; set offload.include_patterns"
                )
            context.progress(f"no include_patterns given; the units are {found}")
            logger.info("units: %s", found)
            config = config.updated(include_patterns=(found,))
        self._pattern = config.include_patterns
        return config

    def _load_whole(self) -> Any:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # a worker has no terminal of its own
        model = AutoModelForCausalLM.from_pretrained(
            str(self.directory), dtype=self._dtype, attn_implementation=self.options.attention
        )
        return model.requires_grad_(False).eval()

    def _torch_device(self) -> torch.device:
        device: torch.device = self._manager.device.torch_device
        return device

    def _encode(self, item: Item) -> _Encoded:
        """The item's text with the chat template, or what is wrong with it."""
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            if "prompt" in item:
                return _Encoded(item, self.options.system_prompt + item["prompt"])
            return _Encoded(item, error="the model has no chat template; give a 'prompt' in place of 'messages'")
        messages = list(item["messages"]) if "messages" in item else [{"role": "user", "content": item["prompt"]}]
        if self.options.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.options.system_prompt})
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes for roles that it does not know
            return _Encoded(item, error=f"the chat template refuses it: {error}")
        length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and length + self.options.max_new_tokens > limit:
            return _Encoded(
                item,
                error=f"{length} prompt tokens and max_new_tokens {self.options.max_new_tokens} exceed "
                f"the model's {limit} positions",
            )
        return _Encoded(item, text)

    def _generate(self, model: Any, items: Sequence[Item], new_tokens: int | None = None) -> list[dict[str, Any]]:
        import torch

        encoded = [self._encode(item) for item in items]
        good = [entry for entry in encoded if not entry.error]
        results = [_failed(entry) for entry in encoded if entry.error]
        if not good:
            return results
        texts, caches = [entry.text for entry in good], self._caches_of(model)
        fixed: dict[str, Any] = {}
        if caches is not None:
            # Copies of the last text end when it does.
            texts += texts[-1:] * (caches.rows - len(texts))
            fixed = caches.padding
        special = self._tokenizer.chat_template is None
        inputs = self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=special, **fixed).to(
            self._torch_device()
        )
        length = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=new_tokens or self.options.max_new_tokens,
                # The whole answer's room in the warm-up, too: the cache's size is a shape.
                **({} if caches is None else caches.take(len(texts), length + self.options.max_new_tokens)),
            )
        rows = output[: len(good), length:].tolist()
        ends = set(self._generation.eos_token_id)
        return results + [self._result(entry, row, ends) for entry, row in zip(good, rows, strict=True)]

    def _caches_of(self, model: Any) -> StaticCaches | None:
        from launch.static_cache import StaticCaches

        if self.options.cache != "static":
            return None
        if id(model) not in self._caches:
            one_graph = self.choice.compiles and not self.choice.captures_graphs
            self._caches[id(model)] = StaticCaches(model, self._torch_device(), one_graph=one_graph)
        return self._caches[id(model)]

    def _allow_graphs(self) -> None:
        """Prefills of several lengths and decode steps differ, and some models' layers read their own index."""
        from flextensor.compiled_offload import bump_dynamo_limits_for_compiled_offload
        from launch.static_cache import GRAPHS_A_UNIT

        if self.choice.compiles:
            bump_dynamo_limits_for_compiled_offload(len(self._manager.units) * GRAPHS_A_UNIT)

    def _result(self, entry: _Encoded, row: list[int], ends: set[int]) -> dict[str, Any]:
        end = next((at for at, token in enumerate(row) if token in ends), None)
        tokens = row if end is None else row[: end + 1]
        answer = self._tokenizer.decode(tokens, skip_special_tokens=True).strip()
        return {
            "id": entry.item["id"],
            **_question(entry.item),
            "answer": answer,
            "tokens": tokens,
            "finish": "length" if end is None else "eos",
        }


def _question(item: Item) -> dict[str, Any]:
    return {"prompt": item["prompt"]} if "prompt" in item else {"messages": item["messages"]}


def _failed(entry: _Encoded) -> dict[str, Any]:
    return {"id": entry.item["id"], **_question(entry.item), "error": entry.error}


def _load_tokenizer(directory: Path) -> Any:
    """Padding on the left, so that the last token of each row is the prompt's last.

    Raises TaskInputError when the directory has no usable tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), padding_side="left")
    except (OSError, ValueError, KeyError) as error:
        raise TaskInputError(f"{directory} has no usable tokenizer: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _greedy(directory: Path, config: Any, tokenizer: Any, max_new_tokens: int) -> Any:
    """Plain arg-max decoding: nothing of the checkpoint's sampling settings but its end tokens."""
    from transformers import GenerationConfig

    if (directory / "generation_config.json").is_file():
        stored = GenerationConfig.from_pretrained(str(directory))
    else:
        stored = GenerationConfig.from_model_config(config)
    own = stored.eos_token_id
    ends = [own] if isinstance(own, int) else list(own or ())
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        ends.append(tokenizer.eos_token_id)
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        use_cache=True,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=stored.bos_token_id,
        disable_compile=True,  # of the whole model, which generate() would do by itself with a static cache on a GPU
    )
