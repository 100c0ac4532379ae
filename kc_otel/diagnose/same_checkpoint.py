"""Check that two kernels run one checkpoint; tensors in which they differ, and static scales that cut off inputs.

A scale that was fixed beforehand cuts off what is larger than calibration has seen. It is a tensor `input_scale` of the
operator, as compressed-tensors writes and vLLM reads it, one for all inputs or for each channel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kc_otel._extras import extra
from kc_otel.contract.words import number
from kc_otel.diagnose.boundaries import Boundary, layer_of
from kc_otel.diagnose.located import NotComparableError, same_layers
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_kernel import TorchKernel

if TYPE_CHECKING:
    from kc_otel.diagnose.vllm_kernel import WatchedKernel

with extra("torch", "locating in a torch module"):
    import torch

_SHAPE_FIELDS: Final = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
)
_IGNORED_FIELDS: Final = frozenset(
    {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "model_type"}
)
_MAX_LISTED_DIFFERENCES: Final = 6
_SCALE_NAME = "input_scale"
_MAX_SEQUENCES = 8
_MIN_COSINE: Final = 0.5
"""Cosine below which two matrices have nothing to do with each other; of quantised ones it is above 0.9."""


def same_architecture(train: Mapping[str, Any], inference: Mapping[str, Any]) -> None:
    """Refuse two configurations of other architecture, number of layers or shapes, whatever their weights."""
    kinds = train.get("model_type"), inference.get("model_type")
    if kinds[0] != kinds[1]:
        raise NotComparableError(
            f"the training kernel is a {kinds[0]} model and the inference kernel a {kinds[1]} model: "
            "they have not the same architecture; give two kernels of one checkpoint"
        )
    for name in _SHAPE_FIELDS:
        ours, theirs = train.get(name), inference.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            raise NotComparableError(
                f"{name} is {ours} in training and {theirs} in inference: "
                "the kernels are not the same checkpoint; give both the same"
            )


def other_settings(train: Mapping[str, Any], inference: Mapping[str, Any]) -> str:
    """Return the other differences of two configurations, in words; empty if there are none.

    >>> other_settings({"rope": {"theta": 1e4}, "dtype": "float32"}, {"rope": {"theta": 5e5}, "dtype": "bfloat16"})
    'rope.theta is 10000.0 in training and 500000.0 in inference'
    >>> other_settings({}, {"quantization_config": {"bits": 8, "format": "int"}})
    'only inference has quantization_config'
    """
    said = [
        f"only {side} has {name}"
        for side, has, lacks in (("training", train, inference), ("inference", inference, train))
        for name, value in has.items()
        if isinstance(value, Mapping) and lacks.get(name) is None
    ]
    shared = [
        {k: v for k, v in a.items() if not isinstance(v, Mapping) or b.get(k) is not None}
        for a, b in ((train, inference), (inference, train))
    ]
    ours, theirs = (dict(_flat(settings)) for settings in shared)
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    said += [f"{name} is {ours.get(name)} in training and {theirs.get(name)} in inference" for name in names]
    more = [f"{len(said) - _MAX_LISTED_DIFFERENCES} more"] if len(said) > _MAX_LISTED_DIFFERENCES else []
    return "; ".join([*said[:_MAX_LISTED_DIFFERENCES], *more])


def complete_layers(checkpoint: str, tensors: Iterable[str]) -> None:
    """Refuse a checkpoint of which a layer lacks what all others have: an engine would compute with any memory."""
    layers: dict[int, set[str]] = {}
    for name in tensors:
        if (layer := layer_of(name)) is not None:
            layers.setdefault(layer, set()).add(name.replace(f".{layer}.", ".*.", 1))
    for layer, held in layers.items() if len(layers) > 2 else ():
        others = [weights for number, weights in layers.items() if number != layer]
        lacking = sorted(set.intersection(*others) - held)
        if lacking and held <= set().union(*others):
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            missing = lacking[0].replace(".*.", f".{layer}.", 1)
            raise NotComparableError(f"{checkpoint}: has no {missing}{more}, which all of its other layers have")


def same_vocabulary(train: Mapping[str, int], inference: Mapping[str, int]) -> None:
    """Refuse two tokenizers that give a token other ids; tokens that only one of them has are no matter."""
    other = [token for token, id in train.items() if inference.get(token, id) != id]
    if other or not train.keys() & inference.keys():
        token = min(other, key=lambda candidate: train[candidate], default="")
        example = f", such as {token!r}: {train[token]} and {inference[token]}" if other else ""
        raise NotComparableError(
            f"the two tokenizers give {len(other) or 'all'} tokens other ids{example}; "
            "the same ids are other texts, so give both kernels one tokenizer"
        )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif prefix or name not in _IGNORED_FIELDS:
            yield f"{prefix}{name}", value


def saturated_scales(
    train: TorchKernel, inference: WatchedKernel, modules: Iterable[str], sequences: Sequence[TokenSequence]
) -> dict[str, tuple[str, str]]:
    """The scales of modules that cut off what the training kernel gives: by module, the tensor and a sentence."""
    scales = {
        name: (module, scale)
        for name in modules
        if isinstance(scale := getattr(module := inference.module.get_submodule(name), _SCALE_NAME, None), torch.Tensor)
    }
    if not scales:
        return {}
    some = sequences[:_MAX_SEQUENCES]
    alone = [[row] for row in range(len(some))]  # without padding
    own, _ = train.run(some, alone)
    beyond: dict[str, list[torch.Tensor]] = {name: [] for name in scales}
    handles = [
        module.register_forward_pre_hook(_times(beyond[name], scale, _most(module)))
        for name, (module, scale) in scales.items()
    ]
    try:
        inference.run(some, alone, replaced=own, taken=False)
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for name, parts in beyond.items():
        times = torch.cat(parts)
        if bool((times > 1.0).any()):
            tensor, largest = f"{name}.{_SCALE_NAME}", times.amax(0)
            share, channel = float((times > 1.0).float().mean()), int(largest.argmax())
            held = f"{number(float(largest[channel]))} times what it can hold"
            cut = f"cuts off {number(100 * share)} % of its inputs, in channel {channel} up to {held}"
            found[name] = tensor, f"tensor {tensor} {cut}"
    return found


def _times(found: list[torch.Tensor], scale: torch.Tensor, most: float) -> Any:
    """A hook that keeps inputs [tokens, channels] as multiples of what a scale can hold."""

    def hook(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor):
            inputs = args[0].detach().float().abs().flatten(0, -2)
            # A value that rounds to the last step is held.
            found.append((inputs / (scale.float() * (most + 0.5))).cpu())

    return hook


def _most(module: torch.nn.Module) -> float:
    """The largest value of the format that inputs are kept in: FP8's where the weights are, int8's otherwise."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dtype.is_floating_point and weight.dtype.itemsize == 1:
        return float(torch.finfo(weight.dtype).max)
    return 127.0


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A parameter of both kernels: relative root mean square difference, and the largest that rounding explains."""

    name: str
    relative: float
    cosine: float
    is_matrix: bool
    rounding: float


@torch.no_grad()  # type: ignore[untyped-decorator]
def tensor_differences(train: TorchKernel, inference: WatchedKernel) -> Mapping[Boundary, tuple[TensorDifference, ...]]:
    """Parameters of operators that both have, by boundary, compared where they are floating and of one shape."""
    ours, theirs = ({boundary: name for name, boundary in side.named.items()} for side in (train, inference))
    same_layers(ours, theirs)
    found = {key: _of_module(train, ours[key], inference, theirs[key]) for key in ours if key in theirs}
    matrices = [difference for differences in found.values() for difference in differences if difference.is_matrix]
    unrelated = [matrix.name for matrix in matrices if matrix.cosine < _MIN_COSINE]
    if len(unrelated) > max(1, len(matrices) // 2):
        raise NotComparableError(
            f"{len(unrelated)} of {len(matrices)} tensors have nothing to do with each other (cosine below "
            f"{_MIN_COSINE:g}), such as {unrelated[0]}: the kernels have not the same checkpoint; give both the same"
        )
    return found


def _of_module(
    train: TorchKernel, train_name: str, inference: WatchedKernel, inference_name: str
) -> tuple[TensorDifference, ...]:
    ours = dict(train.module.get_submodule(train_name).named_parameters(recurse=False))
    found = []
    for name, theirs in inference.module.get_submodule(inference_name).named_parameters(recurse=False):
        own = ours.get(name)
        if own is None or own.shape != theirs.shape or not theirs.is_floating_point():
            continue
        a, b = own.detach().double().flatten().cpu(), theirs.detach().double().flatten().cpu()
        size, error = float(a.norm()), float((b - a).norm())
        cosine = float(a @ b / (a.norm() * b.norm()).clamp_min(1e-300)) if error else 1.0
        difference = error / size if size else (math.inf if error else 0.0)
        rounding = float(torch.finfo(theirs.dtype).eps) / 2
        found.append(TensorDifference(f"{inference_name}.{name}", difference, cosine, own.ndim > 1, rounding))
    return tuple(sorted(found, key=lambda entry: -entry.relative))
