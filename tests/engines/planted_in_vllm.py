"""The ten faults planted in a live vLLM: a small mixture of experts that runs in this process, changed and mended."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kc_otel.contract.model import KernelSpec
from kc_otel.diagnose.token_sequences import TokenSequence
from tests.engines._checkpoints import checkpoint
from tests.tools.contracts import contract_of

LAYERS, PAGE = 4, 8
"""PAGE: tokens of the cache that are lost."""
ENGINE = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
CONTRACT = contract_of(kernels={"train": {"engine": "torch"}, "inference": {"engine": "vllm", "dtype": "float32"}})


def mixture(tiny_model: Path, into: str) -> Path:
    """A mixture of experts with random weights, and the tokenizer of another model."""
    sizes = {"vocab_size": 512, "num_hidden_layers": LAYERS, "hidden_size": 128, "head_dim": 32}
    made = checkpoint(into, "Qwen3Moe", max_position_embeddings=1024, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (made / name).write_bytes((tiny_model / name).read_bytes())
    return made


def conversations(tokenizer: Any, count: int = 8) -> list[TokenSequence]:
    """Prompts of a conversation and random tokens after them."""
    import torch

    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        messages = ({"role": "user", "content": f"def question_{index}(a, b): return a + {index}"},)
        prompt = tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
        )
        completion = torch.randint(8, 500, (16,), generator=generator).tolist()
        found.append(TokenSequence((*prompt, *completion), len(prompt), {}, messages))
    return found


def training(folder: Path) -> Any:
    """The training kernel: the checkpoint in fp32."""
    from kc_otel.diagnose.kernel_sources import checkpoint_kernel

    return checkpoint_kernel(folder, KernelSpec(engine="torch", dtype="float32"))


@dataclass(frozen=True)
class EngineFault:
    """What is planted for a time, and what has to be named."""

    name: str
    plant: Callable[[Any, int, ExitStack], None]
    operator: str
    kind: str = "drift"
    in_layer: bool = True


def _layer(kernel: Any, layer: int) -> Any:
    return kernel.module.get_submodule(f"model.layers.{layer}")


def _rotary(kernel: Any, layer: int, stack: ExitStack) -> None:
    """Layers share one module: the layer gets its own, with another base."""
    attention = _layer(kernel, layer).self_attn
    shared = attention.rotary_emb
    own = copy.deepcopy(shared)
    own.base = 0.9 * shared.base
    own.cos_sin_cache.copy_(own._compute_cos_sin_cache().to(own.cos_sin_cache))
    attention.rotary_emb = own
    stack.callback(setattr, attention, "rotary_emb", shared)


def _unsynced(kernel: Any, layer: int, stack: ExitStack) -> None:
    """As it was some optimizer steps ago."""
    import torch

    weight = _layer(kernel, layer).mlp.experts.routed_experts.w2_weight.data
    kept = weight.clone()
    weight.add_(0.02 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
    stack.callback(weight.copy_, kept)


def _page(kernel: Any, layer: int, stack: ExitStack) -> None:
    """Keys and values of some positions are not what was written."""
    implementation = _layer(kernel, layer).self_attn.attn.impl
    write = implementation.do_kv_cache_update

    def lossy(attention: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        place = slots % cache.shape[2]
        kept = ((place < PAGE) | (place >= 2 * PAGE))[: len(key)].view(-1, 1, 1).to(key.dtype)
        write(attention, key * kept, value * kept, cache, slots)

    implementation.do_kv_cache_update = lossy
    stack.callback(delattr, implementation, "do_kv_cache_update")


def _scale(kernel: Any, layer: int, stack: ExitStack) -> None:
    implementation = _layer(kernel, layer).self_attn.attn.impl
    stack.callback(setattr, implementation, "scale", implementation.scale)
    implementation.scale *= 1.05


def _hooked(path: str, change: Callable[[Any], Any]) -> Callable[[Any, int, ExitStack], None]:
    def plant(kernel: Any, layer: int, stack: ExitStack) -> None:
        def hook(_: Any, __: Any, output: Any) -> Any:
            return (change(output[0]), *output[1:])

        # Before whatever watches it.
        handle = _layer(kernel, layer).get_submodule(path).register_forward_hook(hook, prepend=True)
        stack.callback(handle.remove)

    return plant


def _by_batch(output: Any) -> Any:
    """Sums in bf16 where a batch is larger than one of these prompts alone."""
    return output.bfloat16().to(output.dtype) if len(output) > 30 else output


def _cut(kernel: Any, _: int, stack: ExitStack) -> None:
    processor = kernel.module.logits_processor
    stack.callback(setattr, processor, "org_vocab_size", processor.org_vocab_size)
    processor.org_vocab_size -= 8


def _after_head(name: str, value: float) -> Callable[[Any, int, ExitStack], None]:
    def plant(kernel: Any, _: int, stack: ExitStack) -> None:
        processor = kernel.module.logits_processor
        stack.callback(setattr, processor, name, getattr(processor, name))
        setattr(processor, name, value)

    return plant


def _template(kernel: Any, _: int, stack: ExitStack) -> None:
    """As with a server's own --chat-template."""
    tokenizer = kernel._tokenizer
    other = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, chat_template=other)
    stack.callback(delattr, tokenizer, "apply_chat_template")


def _sampling(kernel: Any, _: int, stack: ExitStack) -> None:
    stack.callback(setattr, kernel._params, "temperature", kernel._params.temperature)
    kernel._params.temperature = 0.9


ENGINE_FAULTS = (
    EngineFault("wrong rotary base in one layer", _rotary, "rotary"),
    EngineFault("unsynced weights of one tensor", _unsynced, "experts"),
    EngineFault("dropped KV page", _page, "kv_cache"),
    EngineFault("changed softmax scale", _scale, "attention"),
    EngineFault("bf16 router", _hooked("mlp.gate", lambda output: output.bfloat16().to(output.dtype)), "router"),
    EngineFault("truncated vocabulary", _cut, "head", "shape", in_layer=False),
    EngineFault("wrong chat template", _template, "tokens", "tokens", in_layer=False),
    EngineFault("other sampling parameters", _sampling, "sampler", "sampler", in_layer=False),
    EngineFault("batch-dependent reduction", _hooked("self_attn.o_proj", _by_batch), "o_proj", "batch"),
)
"""Nine of the ten; scales are planted in a checkpoint, because an engine packs them with its weights."""

CAP = 0.5
AFTER_HEAD = (
    EngineFault("a logit scale", _after_head("scale", 1.25), "model_output", in_layer=False),
    EngineFault("a soft cap", _after_head("soft_cap", CAP), "model_output", in_layer=False),
)


@contextmanager
def planted(kernel: Any, fault: EngineFault | None, layer: int) -> Iterator[None]:
    """The engine with the fault, mended afterwards."""
    with ExitStack() as stack:
        if fault is not None:
            fault.plant(kernel, layer, stack)
        yield


def scales_turned(into_int8: Path, layer: int) -> None:
    """A checkpoint's int8 scales of one product in the wrong order."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(into_int8 / "model.safetensors")
    name = f"model.layers.{layer}.self_attn.o_proj.weight_scale"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, into_int8 / "model.safetensors", metadata={"format": "pt"})
