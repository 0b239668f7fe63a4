"""Text generation with a Hugging Face causal LM: the task that ``flextensor generate`` runs in each worker."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.checkpoints import ItemCheckpoint, ItemCheckpoints
from cluster.messages import Item
from cluster.task import Rehearsal, TaskContext
from flextensor.checkpoint_files import files_stamp
from flextensor.config import OffloadConfig
from launch.causal_lm_options import CausalLMOptions
from launch.compile_choice import CompileChoice
from launch.model_files import TaskInputError, stored_tensors
from launch.text_generation import greedy, load_tokenizer

if TYPE_CHECKING:
    import torch

    from launch.static_cache import StaticCaches

logger = logging.getLogger(__name__)

WARM_UP_ITEM: Item = {"id": "warm-up", "prompt": "Name three rivers of Europe."}
_WARM_UP_NEW_TOKENS = 8
_REHEARSED_TOKENS = 9


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
        self._checkpoints = ItemCheckpoints()
        self._tokenizer: Any = None
        self._generation: Any = None
        self._dtype: torch.dtype | None = None
        self._pattern: tuple[str, ...] = ()
        self._loaded_from = ""
        self._files = ""
        self._prompt_tokens = 0
        """Of the last batch, padding included."""

    def load(self, context: TaskContext) -> None:
        """Build the model on meta, and offload it with its weights straight from safetensors."""
        import flextensor
        from flextensor.store import SafetensorsSource
        from launch.meta_model import NeedsTransformers, build_on_meta, read_config, repeated_block_pattern

        self._checkpoints = context.checkpoints
        self._files = files_stamp(self.directory)  # as they are when they are read
        context.progress("reading the tokenizer")
        config = read_config(self.directory)
        self._tokenizer = load_tokenizer(self.directory)
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
        self._generation = greedy(self.directory, config, self._tokenizer, self.options.max_new_tokens)
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

        A batch that takes long keeps its tokens so far (see ``launch.kept_tokens``); one that was begun before, by
        this process or one that died, goes on behind them after one prefill.
        """
        results: list[dict[str, Any]] = []
        for batch in self._batches(items):
            kept = self._checkpoints.of(self._key(batch))
            results += self._generate(self._model, batch, kept=kept)
            kept.remove()
        return results

    def rehearse(self, items: Sequence[Item], *, brief: bool) -> Rehearsal:
        """A prefill and a few tokens of the items as one batch, whatever end tokens come."""
        good = [item for item in items if not self._encode(item).error]
        good += [good[-1] if good else WARM_UP_ITEM] * (len(items) - len(good))
        whole = self.options.max_new_tokens
        tokens = min(2 if brief else _REHEARSED_TOKENS, whole)
        caches = self._caches_of(self._model)
        try:
            if caches is not None:
                caches.forget()  # it is padded to the most rows that it has seen
            self._generate(self._model, good, tokens, min_new_tokens=tokens)
        finally:
            if caches is not None:
                caches.forget()
        positions = self._prompt_tokens + whole
        a_position = len(good) * self._cache_bytes_a_token()
        return Rehearsal(
            tokens=len(good) * whole,
            leading=1,
            repeats=whole - 1,
            cache_bytes=a_position * positions,
            cached_bytes=a_position * (positions if caches is not None else self._prompt_tokens + tokens),
        )

    def _cache_bytes_a_token(self) -> int:
        """Keys and values of one position of one sequence, over all layers."""
        config = self._model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        kept = getattr(config, "num_key_value_heads", None) or heads
        itemsize: int = self._model.dtype.itemsize
        return 2 * config.num_hidden_layers * kept * head * itemsize

    def _key(self, items: Sequence[Item]) -> str:
        """What the tokens of a batch depend on."""
        where = (str(self.directory.resolve()), self._files)
        model = (*where, str(self._dtype), dataclasses.asdict(self.options))
        return repr((model, [(str(item["id"]), _question(item)) for item in items]))

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

    def _generate(
        self,
        model: Any,
        items: Sequence[Item],
        new_tokens: int | None = None,
        *,
        kept: ItemCheckpoint | None = None,
        **settings: Any,
    ) -> list[dict[str, Any]]:
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
        rows = self._new_tokens(model, inputs, new_tokens or self.options.max_new_tokens, kept, settings)
        ends = set(self._generation.eos_token_id)
        return results + [self._result(entry, row, ends) for entry, row in zip(good, rows, strict=False)]

    def _new_tokens(
        self, model: Any, inputs: Any, count: int, kept: ItemCheckpoint | None, settings: dict[str, Any]
    ) -> list[list[int]]:
        """At most ``count`` tokens behind each row of ``inputs``, those that ``kept`` has taken as they are."""
        import torch

        from launch.kept_tokens import KeptTokens

        texts, length = inputs["input_ids"], inputs["input_ids"].shape[1]
        self._prompt_tokens = length
        mask, caches = inputs["attention_mask"], self._caches_of(model)
        if kept is not None:
            keeper = KeptTokens(kept, texts, frozenset(self._generation.eos_token_id))
            settings = {**settings, "stopping_criteria": [keeper]}
            if keeper.complete(count):
                return keeper.rows
            texts, mask = keeper.continued(texts, mask)
        with torch.inference_mode():
            try:
                output = model.generate(
                    input_ids=texts,
                    attention_mask=mask,
                    max_new_tokens=count - (texts.shape[1] - length),
                    # The whole answer's room in the warm-up, too: the cache's size is a shape.
                    **({} if caches is None else caches.take(len(texts), length + self.options.max_new_tokens)),
                    **settings,
                )
            except torch.OutOfMemoryError:
                if kept is not None:
                    kept.remove()  # a prefill over all tokens so far needs more than the prompt's did
                raise
        rows: list[list[int]] = output[:, length:].tolist()
        return rows

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
