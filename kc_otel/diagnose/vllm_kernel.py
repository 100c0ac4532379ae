"""A live vLLM in this process as a kernel: its layers and its sampler watched, and given other inputs.

Prompts are prefilled and the tokens after them decoded one by one: whatever the engine samples is overwritten by the
token that came. Rows of a batch belong to requests as the model runner says. Compiled graphs have no modules.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from kc_otel._extras import extra
from kc_otel.contract.slices import Scalar
from kc_otel.diagnose.boundaries import HEAD, OUTPUT, Boundary, layer_of
from kc_otel.diagnose.same_checkpoint import complete_layers
from kc_otel.diagnose.token_sequences import TokenSequence, chat_encoder
from kc_otel.diagnose.torch_kernel import TorchKernel, boundaries_in
from kc_otel.diagnose.visits import Activations, EngineVisit

with extra("torch", "locating in an engine"):
    import torch

_EAGER_OPTIONS: Final[Mapping[str, Any]] = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "max_num_seqs": 16,
    "logprobs_mode": "processed_logprobs",
}
_CPU_CACHE_BYTES: Final = 1 << 29
"""KV cache of an engine on a CPU, which would otherwise reserve nearly all memory, or refuse where it is not free."""
_CACHE_OPTIONS: Final = frozenset({"kv_cache_memory_bytes", "gpu_memory_utilization", "VLLM_CPU_KVCACHE_SPACE"})
_ENVIRONMENT: Final = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""Environment of the engine: its own log does not mix with the output, and its first model runner has known rows."""
_HEAD_PRODUCT: Final = "_get_logits"
"""Method of vLLM's LogitsProcessor that gives the head's product; where it is another, the model's output counts."""
_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p")
_OTHER_PROCESS_ERROR: Final = (
    "the engine runs in another process, where its layers cannot be watched: "
    "set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vllm is imported, and give it one worker"
)
_LONGEST_HEADER: Final = 100_000_000
"""Bytes; the format's own limit."""
_PADDING_TOKEN: Final = 1
"""Token of a request that only makes a batch larger."""


class VllmKernel:
    """A `vllm.LLM` in this process, eager, without prefix caching, with `logprobs_mode` for what is sampled."""

    only_seen = frozenset({"kv_cache"})
    """Operators whose outputs can be observed but not replaced: later operators receive them unchanged."""
    has_sampler = True
    """A program of its own makes its distributions, and not its sampling parameters alone."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        config = engine.llm_engine.vllm_config
        _watchable(config.model_config.enforce_eager, config.cache_config.enable_prefix_caching)
        workers = config.parallel_config.world_size
        if workers > 1 or not hasattr(engine.llm_engine.engine_core, "engine_core"):
            raise ValueError(f"{_OTHER_PROCESS_ERROR} (it has {workers} workers)")
        self._runner = engine.collective_rpc(_itself)[0].model_runner
        if not hasattr(self._runner, "query_start_loc"):
            raise ValueError(
                "the engine's model runner is one whose rows are not known: set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        self.module: torch.nn.Module = self._runner.get_model()
        self._most: Final = int(config.model_config.max_model_len)
        self._params: Final = engine.get_default_sampling_params()

    @classmethod
    def of(cls, checkpoint: str, options: Mapping[str, Any]) -> VllmKernel:
        """An engine in this process."""
        wanted = {**_EAGER_OPTIONS, **options}
        _watchable(bool(wanted["enforce_eager"]), bool(wanted["enable_prefix_caching"]))
        if os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
            raise ValueError(_OTHER_PROCESS_ERROR)
        complete_layers(checkpoint, _tensors(Path(checkpoint)))
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with extra("vllm", "an engine"):
            from vllm import LLM  # noqa: PLC0415 - only where vLLM runs
            from vllm.platforms import current_platform  # noqa: PLC0415
        if current_platform.is_cpu() and not _CACHE_OPTIONS & {*options, *os.environ}:
            wanted["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
        try:
            engine = LLM(checkpoint, **wanted)
        except (TypeError, ValueError, RuntimeError, OSError) as error:
            raise ValueError(f"{checkpoint}: vLLM does not load it: {error}") from error
        try:
            return cls(engine)
        except ValueError:
            engine.llm_engine.engine_core.shutdown()
            raise

    def close(self) -> None:
        """End the engine."""
        self._engine.llm_engine.engine_core.shutdown()

    @cached_property
    def named(self) -> dict[str, Boundary]:
        """The boundary of each watched module, by the module's name; one that layers share has a name in each."""
        modules: dict[tuple[int, int | None], tuple[str, torch.nn.Module]] = {}
        for name, module in self.module.named_modules(remove_duplicate=False):
            modules.setdefault((id(module), layer_of(name)), (name, module))
        return boundaries_in(modules.values())

    @property
    def formats(self) -> dict[str, str]:
        """Its number formats, by their names in a contract."""
        config = self._engine.llm_engine.vllm_config
        model, cache = config.model_config, config.cache_config.cache_dtype
        return {"dtype": str(model.dtype), "quantization": model.quantization or "none", "kv_cache_dtype": str(cache)}

    @property
    def dtype(self) -> torch.dtype:
        """Number format that it computes in."""
        found: torch.dtype = self._engine.llm_engine.vllm_config.model_config.dtype
        return found

    @cached_property
    def vocabulary(self) -> Mapping[str, int] | None:
        """Token to id; None for an engine without a tokenizer."""
        tokenizer = self._tokenizer
        return None if tokenizer is None else dict(tokenizer.get_vocab())

    @property
    def encode(self) -> Callable[[Sequence[Mapping[str, str]]], Sequence[int]] | None:
        """Token ids of a conversation; None for an engine without a chat template."""
        return chat_encoder(self._tokenizer)

    @property
    def sampling(self) -> Mapping[str, Scalar]:
        """Sampling parameters that a request without its own gets."""
        return {name: getattr(self._params, name) for name in _SAMPLING}

    @property
    def _tokenizer(self) -> Any:
        config = self._engine.llm_engine.vllm_config.model_config
        return None if config.skip_tokenizer_init else self._engine.get_tokenizer()

    def continued(self, sequences: Sequence[TokenSequence], tokens: int) -> list[TokenSequence]:
        """The same, where one is all prompt with tokens that the engine decodes greedily after it."""
        bare = [sequence for sequence in sequences if sequence.prompt_tokens in {0, len(sequence.token_ids)}]
        if not bare or not tokens:
            return list(sequences)
        outputs = self._generate([sequence.token_ids for sequence in bare], [tokens] * len(bare), temperature=0.0)
        made = dict(zip((id(sequence) for sequence in bare), outputs, strict=True))
        found = []
        for sequence in sequences:
            ids, more = sequence.token_ids, made.get(id(sequence), ())
            found.append(replace(sequence, token_ids=(*ids, *more), prompt_tokens=len(ids)) if more else sequence)
        return found

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def run(
        self,
        sequences: Sequence[TokenSequence],
        batches: Sequence[Sequence[int]],
        *,
        replaced: Activations | None = None,
        taken: bool = True,
        padding: int = 0,
    ) -> tuple[Activations, list[torch.Tensor]]:
        """As of a `TorchKernel`; prompts are prefilled, completions decoded, and padding is another request."""
        visit = EngineVisit(sequences, replaced, taken=taken)
        with self._watched(visit):
            for rows in batches:
                self._go(visit, rows, padding)
        return visit.outputs()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def distributions(self, sequences: Sequence[TokenSequence], logits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As of a `TorchKernel`, by the engine's own sampler, which is given these logits instead of the engine's."""
        visit = EngineVisit(sequences, {OUTPUT: list(logits)}, taken=False, sampled=True)
        with self._watched(visit):
            self._go(visit, range(len(sequences)), 0)
        return visit.sampled()

    def _go(self, visit: EngineVisit, rows: Sequence[int], padding: int) -> None:
        prompts = [visit.prompt(row) for row in rows]
        steps = [visit.steps(row) for row in rows]
        if padding:
            prompts, steps = [(_PADDING_TOKEN,) * padding, *prompts], [1, *steps]
        longest = max(len(prompt) + more for prompt, more in zip(prompts, steps, strict=True))
        if longest > self._most:
            raise ValueError(
                f"a sequence has {longest - 1} tokens and the engine takes {self._most - 1} at most: "
                "give it max_model_len, or shorter sequences"
            )
        first = self._engine.request_counter.counter
        visit.begin({first + place: row for place, row in enumerate([None, *rows] if padding else rows)})
        self._generate(prompts, steps)

    def _generate(
        self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], *, temperature: float | None = None
    ) -> list[tuple[int, ...]]:
        params = []
        for count in tokens:
            own = self._params.clone()
            own.max_tokens, own.min_tokens, own.ignore_eos, own.detokenize, own.stop = count, 0, True, False, []
            own.temperature = own.temperature if temperature is None else temperature
            params.append(own)
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._engine.generate(given, params, use_tqdm=False)
        return [tuple(answer.outputs[0].token_ids) for answer in answers]

    @contextmanager
    def _watched(self, visit: EngineVisit) -> Iterator[None]:
        """Hooks for one visit: rows before a forward, outputs in it, head and cache after it, and the sampler."""
        model, sampler = self.module, self._runner.sampler
        # Engines call what is in the head, and not its module.
        named = {name: boundary for name, boundary in self.named.items() if boundary != HEAD}
        with ExitStack() as stack:
            for hook in (
                model.register_forward_pre_hook(partial(self._rows_of, visit), with_kwargs=True),
                model.register_forward_hook(partial(self._after_forward, visit)),
                sampler.register_forward_pre_hook(partial(_before_sampling, visit), with_kwargs=True),
                sampler.register_forward_hook(lambda _, __, output: visit.force(output.sampled_token_ids)),
            ):
                stack.callback(hook.remove)
            stack.enter_context(visit.of_modules(model, named))
            yield

    def _rows_of(self, visit: EngineVisit, _: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        count = int(self._runner.input_batch.num_reqs)
        positions = options["positions"] if "positions" in options else args[1]
        ends = self._runner.query_start_loc.np[: count + 1].tolist()
        numbers = [int(request.split("-")[0]) for request in self._runner.input_batch.req_ids[:count]]
        firsts = np.asarray(positions.reshape(-1, positions.shape[-1])[0].cpu())[ends[:-1]].tolist()
        visit.forward(numbers, ends, firsts)

    def _after_forward(self, visit: EngineVisit, _: torch.nn.Module, __: tuple[Any, ...], hidden: Any) -> None:
        states = hidden[0] if isinstance(hidden, tuple) else hidden
        if visit.wants_logits:
            with self._head_watched(visit):
                visit(OUTPUT, self.module.compute_logits(states[: visit.rows]))
        watched = self.named.items() if visit.is_taken else ()
        for name, boundary in watched:
            for place, row, tokens in visit.ended if boundary.operator == "attention" else ():
                found = read_back(self.module.get_submodule(name), place, tokens)
                if found is not None:
                    visit.cache(Boundary(boundary.layer, "kv_cache"), row, found)

    @contextmanager
    def _head_watched(self, visit: EngineVisit) -> Iterator[None]:
        """Have the product of the head visited, before the engine's own module scales or caps it."""
        with ExitStack() as stack:
            for module in self.module.modules():
                product = getattr(module, _HEAD_PRODUCT, None)
                if product is not None:
                    setattr(module, _HEAD_PRODUCT, partial(_visited, visit, product))
                    stack.callback(delattr, module, _HEAD_PRODUCT)
            yield


def _watchable(eager: bool, caching: bool) -> None:
    if not eager:
        raise ValueError("the engine compiles its layers, which cannot be watched then: give it enforce_eager=true")
    if caching:
        raise ValueError("the engine skips what it has seen before: give it enable_prefix_caching=false")


def _tensors(folder: Path) -> Iterator[str]:
    """Names of a checkpoint's tensors, as far as they are in files of safetensors: a header of JSON begins each."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length <= _LONGEST_HEADER:
                yield from json.loads(file.read(length))


def _itself(worker: Any) -> Any:
    return worker


def _visited(visit: EngineVisit, product: Callable[..., Any], *args: Any, **options: Any) -> Any:
    output = product(*args, **options)
    changed = visit(HEAD, output)
    return output if changed is None else changed


def _before_sampling(visit: EngineVisit, sampler: Any, _: tuple[Any, ...], options: dict[str, Any]) -> None:
    visit.sample(sampler, options["logits"], options["sampling_metadata"])


def read_back(attention: Any, request: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values of a request, float32 [tokens, heads * features] each; None where the layout is another.

    Known is vLLM's on CPUs: a block has all keys of a head as [features, tokens], then values as [tokens, features].
    """
    with extra("vllm", "an engine"):
        from vllm.forward_context import get_forward_context  # noqa: PLC0415 - only where vLLM runs

    cache = attention.kv_cache
    known = get_forward_context().attn_metadata
    if getattr(attention, "isa", None) != "vec" or not isinstance(known, dict) or cache.ndim != 4:
        return None
    _, heads, size, _ = cache.shape
    table = known[attention.layer_name].block_table[request]
    held = cache[table[: -(-tokens // size)].long()]
    if held.dtype == torch.uint8:
        held = held.view(torch.float8_e5m2 if "e5m2" in attention.kv_cache_dtype else torch.float8_e4m3fn)
    keys, values = held.float().view(len(held), heads, 2 * size, -1).chunk(2, dim=2)
    keys = keys.reshape(len(held), heads, -1, size).permute(0, 3, 1, 2) * attention._k_scale_float  # noqa: SLF001
    values = values.permute(0, 2, 1, 3) * attention._v_scale_float  # noqa: SLF001 - no other name
    return keys.flatten(0, 1)[:tokens].flatten(1), values.flatten(0, 1)[:tokens].flatten(1)


WatchedKernel = TorchKernel | VllmKernel
"""A kernel that can be run on given tokens and watched: a torch module, or an engine in this process."""
