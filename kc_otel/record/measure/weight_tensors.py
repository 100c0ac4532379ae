"""Digests of weights, and updates that an engine loses.

Two programs compare digests instead of tensors: 64 numbers each, made on the tensor's device.

`places` is the sum, modulo 2^64, of a hash of each element's bits and its index; `values` the same without the index,
which does not change where a program stores a tensor in another order, and of the parts of a fused or a split tensor
adds up to that of the whole. Equal tensors have equal digests, others with a chance of about 2^-64: they find accidents
and are no defence against people. `sketch` holds 61 signed sums: of two tensors, the sum of the squares of their
differences is, on average over the signs, the squared distance of the tensors, with a relative error of about 18 %
(Alon, Matias and Szegedy 1999, "The Space Complexity of Approximating the Frequency Moments", 2.2).

An engine has products that a trainer does apart in one (queries, keys and values; gate and up; the experts of a layer),
pads its vocabulary, and on a CPU packs the matrices of linear layers for its own kernels. So `module_digests` finds
tensors by the end of their names and takes them apart by the trainer's shapes, and asks a layer that has packed its
matrix for it: its product with a unit matrix is exact.

`UpdateWatch` finds updates that an engine cannot represent: optimizer steps smaller than half the distance of two of
its numbers. bf16 has eight bits for a number's digits: a weight of 1 moves by 1/256 or by nothing. A trainer that keeps
its weights in float32 adds up what is smaller, and the engine goes on with the old policy until enough comes together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from kc_otel._extras import extra

with extra("torch", "a look at weights"):
    import torch


_MAX_LISTED_TENSORS: Final = 10
_SUMS: Final = 61  # a prime, so that rows and columns of a matrix do not fall into one of the sums
_BLOCK: Final = _SUMS << 16  # elements worked on at a time: four int64 copies of them are 128 MB
_STEP: Final = -7046029254386353131
"""The golden ratio in 64 bits, as a signed integer: Steele, Lea and Flood 2014, SplitMix64."""
_FIRST_MULTIPLIER: Final = -4658895280553007687
_SECOND_MULTIPLIER: Final = -7723592293110705685
_PACKED_MODULES: Final[Mapping[str, Sequence[str]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused modules of vLLM and SGLang, for models that do not list them in `packed_modules_mapping`."""
_EXPERT: Final = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)\.weight$")
_EXPERT_TENSORS: Final[Mapping[str, tuple[str, int | None]]] = {
    **dict.fromkeys(("gate_proj", "w1"), ("w13_weight", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("w13_weight", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("w2_weight", None)),
}
"""A trainer's matrix of an expert -> the engine's tensor of all experts, and which half of it."""
_ROWS: Final = 256  # rows of the unit matrix that a packed layer is asked with at a time
Shapes = Mapping[str, Sequence[int]]
Part = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """Digest of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # number format of its elements, without `torch.`
    places: int  # digest of its elements and their places, a signed integer of 64 bits
    values: int  # of its elements, wherever they are; zeros do not count
    squares: float  # sum of the elements' squares
    sketch: tuple[float, ...]  # signed sums, 61 of them

    @property
    def norm(self) -> float:
        """Euclidean norm."""
        return math.sqrt(self.squares)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def apart(self, other: Self) -> float:
        """Estimate of ||a - b|| / ||a||; of tensors of the same shape."""
        distance = math.dist(self.sketch, other.sketch)
        return distance / self.norm if self.squares else math.inf if distance else 0.0

    def to_plain(self) -> dict[str, Any]:
        """Return a mapping of plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        """Return the digest that `to_plain` encoded; TypeError if it is none."""
        return cls(**{**plain, "shape": tuple(plain["shape"]), "sketch": tuple(plain["sketch"])})


@torch.no_grad()  # type: ignore[untyped-decorator]
def digest_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorDigest:
    """The digest of a tensor of any shape, on any device, rounded to a `dtype` first where there is one.

    ValueError if it has no elements to look at: a meta tensor, or one that is split over processes.

    >>> weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> digest_of(weights) == digest_of(weights.clone()), digest_of(weights).places == digest_of(weights.T).places
    (True, False)
    >>> digest_of(weights).values == digest_of(weights.T).values
    True
    """
    if tensor.is_meta:
        raise ValueError("the tensor is on the meta device: it has no values")
    if hasattr(tensor, "full_tensor"):
        raise ValueError("the tensor is split over processes (DTensor); give its full_tensor()")
    kind = dtype or tensor.dtype
    flat = tensor.detach().reshape(-1)
    totals = torch.zeros(2, dtype=torch.int64, device=flat.device)
    sums = torch.zeros(_SUMS + 1, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK].to(kind)
        bits = _bits(part)
        places = _mixed(torch.arange(start + 1, start + part.numel() + 1, device=flat.device) * _STEP)
        totals[0] += _mixed(bits ^ places).sum()
        totals[1] += (_mixed(bits) * (bits != 0)).sum()
        numbers = part.double()
        sums[-1] += numbers.square().sum()
        signed = torch.where(places < 0, -numbers, numbers)
        sums[:-1] += torch.nn.functional.pad(signed, (0, -signed.numel() % _SUMS)).view(-1, _SUMS).sum(0)
    found: Sequence[float] = sums.tolist()
    places_total, values_total = totals.tolist()
    name = str(kind).removeprefix("torch.")
    return TensorDigest(tuple(tensor.shape), name, places_total, values_total, found[-1], tuple(found[:-1]))


def _bits(part: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers, int64 [n]."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return part.contiguous().view(sizes[part.element_size()]).to(torch.int64)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, one to one on 64 bits, 0 to 0."""
    for shift, factor in ((30, _FIRST_MULTIPLIER), (27, _SECOND_MULTIPLIER)):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Shifted to the right with zeros coming in, which signed integers do not have by themselves."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)


def tail_of(name: str) -> str:
    """The end of a tensor's name that trainers and engines have in common: from the layer on, or the last two words.

    >>> tail_of("_fsdp_wrapped_module.model.layers.3.self_attn.q_proj.weight"), tail_of("model.norm.weight")
    ('layers.3.self_attn.q_proj.weight', 'norm.weight')
    """
    words = [word for word in name.split(".") if word not in {"_fsdp_wrapped_module", "_orig_mod", "module"}]
    for place, word in enumerate(words[:-1]):
        if word in {"layers", "h", "blocks"} and words[place + 1].isdigit():
            return ".".join(words[place:])
    return ".".join(words[-2:])


@torch.no_grad()  # type: ignore[untyped-decorator]
def module_digests(model: torch.nn.Module, shapes: Shapes) -> dict[str, Any]:
    """Digests of an engine's tensors under a trainer's names, whose `shapes` are given.

    `tensors` has `TensorDigest.to_plain` by name; `absent` why there is none of the others. Lists, numbers and texts
    only, which pass through any remote call.
    """
    held = _Held(model)
    packed = {**_PACKED_MODULES, **dict(getattr(model, "packed_modules_mapping", None) or {})}
    name_at = {tail_of(name): name for name in shapes}
    found: dict[str, Any] = {}
    absent = dict.fromkeys(shapes, "the engine has no tensor that it could be found in")
    for tail, name in name_at.items():
        for module, tensor in () if name in found else _parts(tail, name, name_at, packed, held, shapes):
            if tensor.dtype.is_floating_point and tensor.element_size() > 1:
                found[module] = digest_of(tensor).to_plain()
                absent.pop(module, None)
            else:
                absent[module] = f"the engine has it in {str(tensor.dtype).removeprefix('torch.')}, with scales"
    return {"tensors": found, "absent": absent}


class _Held:
    """An engine's tensors by the ends of their names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._at: dict[str, dict[int, tuple[torch.nn.Module, str]]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for word, tensor in module.named_parameters(recurse=False):
                if tensor.ndim:
                    tail = tail_of(f"{path}.{word}").replace(".experts.routed_experts.", ".experts.")
                    self._at.setdefault(tail, {})[id(module)] = (module, word)

    def __call__(self, tail: str) -> torch.Tensor | None:
        """The tensor with a tail; None where there is none, or several."""
        modules = self._at.get(tail, {})
        return _matrix(*next(iter(modules.values()))) if len(modules) == 1 else None


def _parts(
    tail: str,
    name: str,
    name_at: Mapping[str, str],
    packed: Mapping[str, Sequence[str]],
    held: Callable[[str], torch.Tensor | None],
    shapes: Shapes,
) -> Iterator[Part]:
    """The engine's share of a trainer's tensor, and of those that it is fused with."""
    if (alone := held(tail)) is not None:
        return _cut(alone, (name,), shapes)
    if (group := _group(tail, packed, name_at)) and (whole := held(group[0])) is not None:
        return _cut(whole, group[1], shapes)
    return _of_expert(name, tail, held)


def _group(tail: str, packed: Mapping[str, Sequence[str]], name_at: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """Tail of the engine's fused tensor, and the trainer's names of its parts in order."""
    words = tail.split(".")
    for fused, parts in packed.items():
        place = next((at for at, word in enumerate(words) if word in parts), None)
        if place is None:
            continue
        of_parts = [".".join([*words[:place], part, *words[place + 1 :]]) for part in parts]
        if len(parts) > 1 and all(name in name_at for name in of_parts):
            return ".".join([*words[:place], fused, *words[place + 1 :]]), [name_at[name] for name in of_parts]
    return None


def _cut(tensor: torch.Tensor, names: Sequence[str], shapes: Shapes) -> Iterator[Part]:
    """A tensor taken apart along its first axis by the trainer's shapes; rows behind those are padding.

    Where the tensor is a share of each part, as tensor parallelism leaves it, the parts are such shares.
    """
    rows = [int(shapes[name][0]) for name in names]
    total, have = sum(rows), tensor.shape[0]
    if have < total and total % have == 0 and all(row * have % total == 0 for row in rows):
        rows = [row * have // total for row in rows]
    if sum(rows) > have:
        return
    start = 0
    for name, count in zip(names, rows, strict=True):
        yield name, tensor[start : start + count]
        start += count


def _of_expert(name: str, tail: str, tensor_at: Callable[[str], torch.Tensor | None]) -> Iterator[Part]:
    """One expert's matrix in the tensor of all: gate and up are the halves of one."""
    matched = _EXPERT.match(tail)
    where = None if matched is None else _EXPERT_TENSORS.get(matched[3])
    if matched is None or where is None:
        return
    every = tensor_at(f"{matched[1]}.{where[0]}")
    if every is None or every.ndim != 3 or int(matched[2]) >= every.shape[0]:
        return
    expert = every[int(matched[2])]
    half = expert.shape[0] // 2
    yield name, expert if where[1] is None else expert[where[1] * half : (where[1] + 1) * half]


def _matrix(module: torch.nn.Module, word: str) -> torch.Tensor | None:
    """A module's tensor; of a linear layer that has packed its matrix and let go of it, what it multiplies by."""
    tensor: torch.Tensor = getattr(module, word)
    if tensor.numel():
        return tensor.detach()
    method = getattr(module, "quant_method", None)
    width = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None)
    if word != "weight" or method is None or width is None:
        return None
    columns = []
    for start in range(0, width, _ROWS):
        unit = torch.zeros(min(_ROWS, width - start), width, dtype=tensor.dtype, device=tensor.device)
        unit[torch.arange(unit.shape[0]), torch.arange(start, start + unit.shape[0])] = 1.0
        columns.append(method.apply(module, unit, bias=None))
    return torch.cat(columns).T.contiguous()


@dataclass(frozen=True, slots=True)
class RoundedUpdates:
    """Fate of the updates between two looks."""

    changed: Mapping[str, int]  # elements that were looked at and had changed, by tensor
    lost: Mapping[str, int]  # of these, those that are the same number as before in the engine's format

    @property
    def share(self) -> float:
        """Lost of changed, over all tensors: `updates_rounded_away` of a contract; nan where nothing changed."""
        changed = sum(self.changed.values())
        return sum(self.lost.values()) / changed if changed else math.nan

    def __str__(self) -> str:
        worst = sorted((name for name in self.lost if self.changed[name]), key=lambda name: -self._of(name))
        lines = [f"{self.share:.1%} of the changed weights are the same number as before in the engine's format"]
        lines += [f"  {name}: {self.lost[name]} of {self.changed[name]}" for name in worst[:_MAX_LISTED_TENSORS]]
        return "\n".join(lines)

    def _of(self, name: str) -> float:
        return self.lost[name] / self.changed[name]


class UpdateWatch:
    """Looks at the same elements of each tensor before and after an update; at most `elements` of each, evenly over it.

    >>> weights = torch.tensor([1.0, 1.0, 100.0, 1.0])
    >>> watch = UpdateWatch()
    >>> watch.look({"layer": weights}.items())
    >>> found = watch.look({"layer": weights + torch.tensor([0.01, 0.001, 0.01, 0.0])}.items())
    >>> found.lost, found.changed, f"{found.share:.2f}"
    ({'layer': 2}, {'layer': 3}, '0.67')
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, elements: int = 4096) -> None:
        if elements < 1 or not dtype.is_floating_point:
            raise ValueError(f"elements: {elements}, dtype: {dtype}; give a number above 0 and a floating format")
        self._dtype = dtype
        self._elements = elements
        self._known: dict[str, torch.Tensor] = {}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def look(self, trainer: Iterable[tuple[str, torch.Tensor]]) -> RoundedUpdates | None:
        """Return the fate of the updates since the last look; None on the first look.

        Tensors come in the format that the optimizer updates: float32 master weights where there are such. Of split
        tensors, the own part.
        """
        changed: dict[str, int] = {}
        lost: dict[str, int] = {}
        now: dict[str, torch.Tensor] = {}
        for name, tensor in trainer:
            flat = getattr(tensor, "_local_tensor", tensor).detach().reshape(-1)
            step = -(-flat.numel() // self._elements) or 1
            now[name] = flat[::step].clone()
            before = self._known.get(name)
            if before is not None and before.shape == now[name].shape:
                moved = before != now[name]
                same = before.to(self._dtype) == now[name].to(self._dtype)
                changed[name], lost[name] = (int(count) for count in torch.stack([moved.sum(), (moved & same).sum()]))
        first, self._known = not self._known, now
        return None if first else RoundedUpdates(changed, lost)
