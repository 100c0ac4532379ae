"""A checkpoint served in lower precision, simulated in torch and judged by the gate: what `kc-otel precision` runs.

Every run samples anew: the candidate kernel continues the prompts at temperature 1, the training kernel scores what it
sampled, and the contract judges. Half of the sequences are for the search, the others for what it has found.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from kc_otel._extras import extra
from kc_otel.contract.model import Contract
from kc_otel.diagnose.boundaries import boundaries_of
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_formats import WeightFormat, rounded_activations, rounded_weight, rounding_cache
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.judge.verdict import Verdict
from kc_otel.offline.gate.recorded_verdicts import by_contract, judge
from kc_otel.offline.remedy.precision import Component
from kc_otel.recordings import Recording

with extra("torch", "serving a torch module in lower precision"):
    import torch

__all__ = ["KV_CACHE", "ServedInLess"]

KV_CACHE: Final = "kv_cache"
_HALF: Final = 2


class ServedInLess:
    """A model whose matrices are kept in a format, but for some that are kept in 16 bits.

    Args:
        contract: Judges.
        train: The training kernel.
        sequences: Their prompts are continued; at least two, with a prompt each.
        format: Of the matrices that are not kept.
        dtype: What the candidate computes in.
        by: What is kept together: `layer`, `operator` or `matrix`.
        kv: Format of the KV cache; None for the candidate's own.
        kv_tokens: Tokens in the cache, for what keeping it in 16 bits costs.
        tokens: Tokens that are sampled for each prompt.
        matrices: What a tool has made of matrices, by module, in floating point; None to round them to the format.

    Raises:
        ValueError: If a sequence has no prompt, there are too few, the model has no matrix, or no cache to round.
    """

    def __init__(
        self,
        contract: Contract,
        train: TorchKernel,
        sequences: Sequence[TokenSequence],
        format: WeightFormat,
        *,
        dtype: torch.dtype = torch.bfloat16,
        by: str = "layer",
        kv: torch.dtype | None = None,
        kv_tokens: int = 0,
        tokens: int = 48,
        matrices: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        if len(sequences) < 2 or not all(each.prompt_tokens for each in sequences):
            raise ValueError("sequences: two or more are needed, each with prompt_ids that can be continued")
        self._contract, self._train, self._tokens, self._kv = contract, train, tokens, kv
        self._sequences = sequences[0::2], sequences[1::2]
        self._format = format
        self._module = copy.deepcopy(train.module).to(dtype).eval()
        shared = {id(each.weight) for each in self._module.modules() if isinstance(each, torch.nn.Embedding)}
        self._matrices = {
            name: each
            for name, each in self._module.named_modules()
            # A tied head stays as it is in engines, and what a tool has left alone as it left it.
            if isinstance(each, torch.nn.Linear) and id(each.weight) not in shared and name in (matrices or {name})
        }
        if not self._matrices:
            raise ValueError("the model has no torch.nn.Linear of its own: there is nothing to keep in fewer bits")
        self._kept = {name: each.weight.data for name, each in self._matrices.items()}
        self._less = {
            name: rounded_weight(weight, format) if matrices is None else _made(name, weight, matrices[name])
            for name, weight in self._kept.items()
        }
        self._group = _grouped(self._matrices, by)
        self._cached = hasattr(getattr(self._module, "config", None), "num_hidden_layers")
        if kv is not None and not self._cached:
            raise ValueError("a KV cache's format can be tried on Hugging Face checkpoints; this module has no cache")
        self.bytes = sum(format.bytes(weight) for weight in self._kept.values())
        """Memory of the matrices with nothing kept."""
        costs: dict[str, int] = {}
        for name, weight in self._kept.items():
            group = self._group[name]
            costs[group] = costs.get(group, 0) + _HALF * weight.numel() - format.bytes(weight)
        self.components = [Component(name, cost) for name, cost in costs.items() if cost > 0]
        if kv is not None:
            self.components.append(Component(KV_CACHE, max(1, kv_tokens * _cache_bytes(self._module.config))))

    def __call__(self, kept: frozenset[str], new: bool) -> Sequence[Verdict]:
        """The gate's verdicts with these components kept; on requests that no run has seen, where they are to be."""
        with self._serving(kept):
            recording = self._recorded(self._sequences[new], seed=int(new), kv=None if KV_CACHE in kept else self._kv)
        return judge(self._contract, by_contract(recording, self._contract), time.time()).verdicts

    @contextmanager
    def _serving(self, kept: frozenset[str]) -> Iterator[None]:
        handles = []
        for name, each in self._matrices.items():
            less = self._group[name] not in kept
            each.weight.data = self._less[name] if less else self._kept[name]
            if less and self._format.activations:
                handles.append(each.register_forward_pre_hook(_on_first(rounded_activations(self._format.bits))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _recorded(self, sequences: Sequence[TokenSequence], *, seed: int, kv: torch.dtype | None) -> Recording:
        generator = torch.Generator().manual_seed(seed)
        by_length: dict[int, list[int]] = {}
        for index, each in enumerate(sequences):
            by_length.setdefault(each.prompt_tokens, []).append(index)
        ours, theirs = np.zeros((len(sequences), self._tokens)), np.zeros((len(sequences), self._tokens))
        for length, rows in by_length.items():
            prompts = torch.tensor([sequences[row].token_ids[:length] for row in rows])
            ids, theirs[rows] = self._continued(prompts, generator, kv)
            logits = _logits(self._train.module(ids.to(self._train.device)))[:, length - 1 : -1].float().log_softmax(-1)
            ours[rows] = logits.cpu().gather(-1, ids[:, length:, None])[..., 0].numpy()
        lengths = np.full(len(sequences), self._tokens)
        return Recording(ours.ravel(), theirs.ravel(), lengths, tuple(dict(each.attributes) for each in sequences))

    def _continued(
        self, prompts: torch.Tensor, generator: torch.Generator, kv: torch.dtype | None
    ) -> tuple[torch.Tensor, Any]:
        """Tokens [B, prompt + sampled] and the candidate's log-probabilities of the sampled ones."""
        ids, found = prompts, []
        device = next(self._module.parameters()).device
        cache = rounding_cache(kv) if self._cached else None
        for step in range(self._tokens):
            if cache is None:
                output = self._module(ids.to(device))
            else:
                output = self._module(ids[:, -1:].to(device) if step else ids.to(device), past_key_values=cache)
            logprobs = _logits(output)[:, -1].float().log_softmax(-1).cpu()
            chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)
            found.append(logprobs.gather(-1, chosen))
            ids = torch.cat([ids, chosen], 1)
        return ids, torch.cat(found, 1).numpy()


def _made(name: str, weight: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    if made.shape != weight.shape or not made.is_floating_point():
        raise ValueError(f"{name}: the tool's matrix is not the model's in floating point; let the tool dequantise it")
    return made.to(weight.dtype)


def _logits(output: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(output, "logits", output)
    return found


def _grouped(names: Mapping[str, Any], by: str) -> dict[str, str]:
    """What each matrix is kept together with."""
    if by == "matrix":
        return {name: name for name in names}
    boundaries = boundaries_of((name, True) for name in names)
    if by == "operator":
        return {name: each.operator for name, each in boundaries.items()}
    return {name: name if each.layer is None else f"layer {each.layer}" for name, each in boundaries.items()}


def _on_first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda _module, args: (change(args[0]), *args[1:])


def _cache_bytes(config: Any) -> int:
    """What a token costs more in 16 bits than in 8."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size)
