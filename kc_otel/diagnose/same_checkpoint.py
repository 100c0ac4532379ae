"""Check that two kernels run the same model: architecture, shapes and tokenizer, as their checkpoints state them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kc_otel.diagnose.boundaries import layer_of
from kc_otel.diagnose.located import NotComparableError

_SHAPES: Final = (
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
_OF_NO_MATTER: Final = frozenset(
    {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "model_type"}
)
_MAX_LISTED_DIFFERENCES: Final = 6


def same_architecture(train: Mapping[str, Any], inference: Mapping[str, Any]) -> None:
    """Refuse two configurations of other architecture, number of layers or shapes, whatever their weights."""
    kinds = train.get("model_type"), inference.get("model_type")
    if kinds[0] != kinds[1]:
        raise NotComparableError(
            f"the training kernel is a {kinds[0]} model and the inference kernel a {kinds[1]} model: "
            "they have not the same architecture; give two kernels of one checkpoint"
        )
    for name in _SHAPES:
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
    """Refuse a checkpoint one of whose layers lacks what every other has, and has nothing of its own instead.

    An engine would compute with whatever stands in memory.
    """
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
        elif prefix or name not in _OF_NO_MATTER:
            yield f"{prefix}{name}", value
