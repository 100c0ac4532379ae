"""Places where an operator of a model hands its output on, by one name for every program that runs the model.

It is a layer and an operator, found from the end of a module's name in a trainer, Hugging Face or vLLM.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from kc_otel.contract.words import boundary_name

Output = TypeVar("Output")

_LAYER_PATH: Final = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)(?:\.(.+))?$")
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "embedding": ("embed_tokens", "wte", "embed", "tok_embeddings", "word_embeddings"),
    "position_embedding": ("wpe",),
    "attention_norm": ("input_layernorm", "ln_1", "norm_attention", "norm1", "attention_norm"),
    "mlp_norm": ("post_attention_layernorm", "ln_2", "norm_mlp", "norm2", "ffn_norm"),
    "final_norm": ("norm", "ln_f", "final_norm"),
    "q_norm": ("q_norm",),
    "k_norm": ("k_norm",),
    "q_proj": ("q_proj", "wq"),
    "k_proj": ("k_proj", "wk"),
    "v_proj": ("v_proj", "wv"),
    "qkv_proj": ("qkv_proj", "qkv", "c_attn", "query_key_value"),
    "rotary": ("rotary_emb", "rotary", "rope"),
    "kv_cache": ("kv_cache", "cache"),
    "attention": ("self_attn.attn", "attention_core"),
    "o_proj": ("o_proj", "wo", "out_proj", "attn.c_proj", "out"),
    "router": ("mlp.gate", "router", "block_sparse_moe.gate", "mlp.router"),
    "experts": ("experts",),
    "gate_proj": ("gate_proj", "w1"),
    "up_proj": ("up_proj", "up", "c_fc", "fc1", "w3"),
    "gate_up_proj": ("gate_up_proj",),
    "down_proj": ("down_proj", "down", "mlp.c_proj", "fc2", "w2"),
    "head": ("lm_head", "head", "output"),
}
_OPERATOR_OF: Final = {name: operator for operator, names in _NAMES.items() for name in names}

INPUT_OF: Final[Mapping[str, str]] = {"o_proj": "attention", "down_proj": "activation"}
"""Functions whose output is an operator's input: in many models, attention and activation are not modules."""

FUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Products that an inference kernel does at once, and what a training kernel has instead, in the order of features."""


@dataclass(frozen=True, slots=True, order=True)
class Boundary:
    """An operator's output in a layer, None before and after the layers; `part` is which of several, as of rotary."""

    layer: int | None
    operator: str
    part: int = 0

    def __str__(self) -> str:
        return boundary_name(self.layer, self.operator, self.part)


HEAD: Final = Boundary(None, "head")
OUTPUT: Final = Boundary(None, "model_output")
"""Boundary at which a model hands out its logits: after what follows the head, such as a scale or a soft cap."""
SAMPLER: Final = Boundary(None, "sampler")
"""Boundary at which sampling parameters have been applied to the logits."""
TOKENS: Final = Boundary(None, "tokens")
"""Boundary at which tokenizer and chat template have been applied to a conversation."""


def by_operator(boundaries: Iterable[Boundary]) -> dict[str, list[Boundary]]:
    """Boundaries of one operator together, by a name that says its layers.

    >>> list(by_operator([Boundary(0, "o_proj"), Boundary(1, "o_proj"), Boundary(3, "o_proj"), Boundary(None, "head")]))
    ['o_proj in layers 0-1, 3', 'head']
    """
    found: dict[str, list[Boundary]] = {}
    for boundary in boundaries:
        found.setdefault(boundary.operator, []).append(boundary)
    return {_with_layers(operator, group): group for operator, group in found.items()}


def _with_layers(operator: str, group: Iterable[Boundary]) -> str:
    layers = sorted({boundary.layer for boundary in group if boundary.layer is not None})
    if not layers:
        return operator
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    said = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{operator} in layer{'s' if len(layers) > 1 else ''} {said}"


def fused_parts(boundaries: Iterable[Boundary]) -> dict[Boundary, list[Boundary]]:
    """Map each fused product of an engine to the training kernel's products that it consists of, in order."""
    known = dict.fromkeys(boundaries)
    found = {}
    for operator, parts in FUSED.items():
        for layer in dict.fromkeys(boundary.layer for boundary in known):
            keys = [Boundary(layer, part) for part in parts]
            if all(key in known for key in keys):
                found[Boundary(layer, operator)] = keys
    return found


def fused(outputs: Mapping[Boundary, Output], join: Callable[[list[Output]], Output]) -> dict[Boundary, Output]:
    """Outputs with products of one input side by side, in the place of the first: queries, keys and values as one."""
    parts = fused_parts(outputs)
    first = {keys[0]: whole for whole, keys in parts.items()}
    others = {key for keys in parts.values() for key in keys[1:]}
    return {
        first.get(key, key): join([outputs[part] for part in parts[first[key]]]) if key in first else value
        for key, value in outputs.items()
        if key not in others
    }


def in_order(runs: Iterable[Iterable[Boundary]]) -> list[Boundary]:
    """Boundaries of several runs, each in the order of execution, in one such order.

    >>> embedding, norm, head = (Boundary(None, operator) for operator in ("embedding", "final_norm", "head"))
    >>> [str(key) for key in in_order([[embedding, head], [embedding, norm, head]])]
    ['embedding', 'final_norm', 'head']
    """
    found: list[Boundary] = []
    for run in map(list, runs):
        known, place = set(found), 0
        for key in run if not known.issuperset(run) else ():
            if key in known:
                place = found.index(key) + 1
            else:
                found.insert(place, key)
                place += 1
    return found


def layer_of(name: str) -> int | None:
    """Return the number of a module's layer by its dotted name; None if it is in no layer."""
    matched = _LAYER_PATH.search(name)
    return int(matched[1]) if matched else None


def boundaries_of(modules: Iterable[tuple[str, bool]]) -> dict[str, Boundary]:
    """Return the modules that are boundaries; `modules` are dotted names, each with True for a leaf with parameters.

    Such leaves and the table's names are. Where two would have the same name, as experts do, each keeps its path.
    """
    found: dict[str, tuple[int | None, str, str]] = {}
    for name, is_leaf in modules:
        matched = _LAYER_PATH.search(name)
        layer, path = (int(matched[1]), matched[2] or "") if matched else (None, name)
        if matched and not path:
            found[name] = (layer, "block", path)
            continue
        tail = path.split(".")
        operator = _OPERATOR_OF.get(".".join(tail[-2:])) or _OPERATOR_OF.get(tail[-1])
        # A gate or norm named like a top-level one has another meaning inside of a layer, and the reverse.
        if operator == "final_norm" and layer is not None:
            operator = None
        if operator is not None or (is_leaf and name):
            found[name] = (layer, operator or path, path)
    times = Counter((layer, operator) for layer, operator, _ in found.values())
    return {
        name: Boundary(layer, operator if times[layer, operator] == 1 else path or operator)
        for name, (layer, operator, path) in found.items()
    }
