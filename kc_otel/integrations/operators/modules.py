"""Two models' modules watched through forward hooks: how far each operator drifts, alone or in its place.

`isolated` gives the inference model's module the very input of the training model's: the result is the drift of that
operator alone. `in-situ` compares the modules as each model runs them: drift that has accumulated up to there. Nothing
raises into a forward; the recorder counts outputs that cannot be compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from kc_otel._extras import extra
from kc_otel.contract.fields import operator_name
from kc_otel.integrations.torch import AttachedHooks, HookGuard, UnpicklableHook
from kc_otel.record.operator_rows import output_of
from kc_otel.record.recorder import Recorder
from kc_otel.record.sequence_attributes import Attributes

with extra("torch", "watching modules"):
    import torch

_NOT_SAMPLED: Final = object()
_CACHES: Final = ("past_key_values", "past_key_value", "layer_past")


class OperatorWatch(AttachedHooks):
    """The hooks of watched operators.

    Attributes:
        operators: By name of an operator, the watched modules of the training model.
    """

    def __init__(self, operators: Mapping[str, tuple[str, ...]], handles: Sequence[Any]) -> None:
        super().__init__(handles)
        self.operators: Final = dict(operators)


def watch_modules(
    train_model: torch.nn.Module,
    inference_model: torch.nn.Module,
    operators: Mapping[str, str] | Sequence[str],
    recorder: Recorder,
    *,
    mode: Literal["isolated", "in-situ"] = "isolated",
    rename: Callable[[str], str] | None = None,
    attributes: Callable[[], Attributes] | Attributes = None,
    mask: Callable[[], torch.Tensor | None] | None = None,
) -> OperatorWatch:
    """Compare modules of two models while they run.

    >>> import copy
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    >>> rounded = copy.deepcopy(model).bfloat16().eval()
    >>> recorder = Recorder("contracts/attention-kernel-upgrade.yaml")
    >>> with watch_modules(model, rounded, {"projection": "0"}, recorder) as watch:
    ...     output = model(torch.ones(2, 8))
    >>> watch.operators
    {'projection': ('0',)}
    >>> recorder.shutdown()
    True

    `isolated` runs the inference model's module inside the training model's forward, without autograd and outside of
    autocast, for the share of calls that the recorder samples; floating inputs are cast to its dtype, and its device is
    taken to be the same. `in-situ` keeps one output per module until the other model's comes: call the two models in
    turn, with the same batch.

    Args:
        train_model: The training kernel's model, or the reference.
        inference_model: The inference kernel's model, in `eval` mode.
        operators: Names of modules, or patterns (`layers.*.mlp`), each module watched under its own name; or a mapping
            from the name of an operator to such a name or pattern, whose modules are then recorded together.
        recorder: Where to.
        mode: What a module is given.
        rename: Name of the inference model's module for one of the training model's; None where they are the same.
        attributes: What decides the slices, or a function that says it at each comparison.
        mask: Says which rows of an output count, [sequences, tokens]; None where all do.

    Raises:
        ValueError: If a name or pattern fits no module, a module is missing in the inference model, or that is in
            training mode.
    """
    if mode not in ("isolated", "in-situ"):
        raise ValueError(f"mode: {mode!r} is not one; write isolated or in-situ")
    if inference_model.training:
        raise ValueError("inference_model: it is in training mode; call inference_model.eval()")
    found = _resolved(train_model, operators)
    others = dict(inference_model.named_modules())
    pairs = []
    for operator, names in found.items():
        for name in names:
            other = rename(name) if rename is not None else name
            if other not in others:
                raise ValueError(f"inference_model: it has no module {other!r}; say its name there with rename")
            pairs.append((operator, train_model.get_submodule(name), others[other]))
    recording = _OperatorRecording(recorder, attributes, mask)
    handles = []
    for operator, ours, theirs in pairs:
        if mode == "isolated":
            alone = _Isolated(recording, operator, theirs)
            handles += [
                ours.register_forward_pre_hook(_Before(alone), with_kwargs=True),
                ours.register_forward_hook(_After(alone)),
            ]
        else:
            slot = _Slot(recording, operator)
            handles += [
                ours.register_forward_hook(_InSitu(slot, 0)),
                theirs.register_forward_hook(_InSitu(slot, 1)),
            ]
    return OperatorWatch(found, handles)


def _resolved(model: torch.nn.Module, operators: Mapping[str, str] | Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Names of modules by operator."""
    known = [name for name, _ in model.named_modules() if name]
    wanted = list(operators.items()) if isinstance(operators, Mapping) else [(None, operator) for operator in operators]
    if isinstance(operators, str) or not wanted:
        raise ValueError(f"operators: {operators!r} names none; give a list of module names, or a mapping")
    found: dict[str, tuple[str, ...]] = {}
    for operator, pattern in wanted:
        names = tuple(name for name in known if fnmatchcase(name, pattern))
        if not names:
            raise ValueError(f"operators: no module fits {pattern!r}; there are {', '.join(known[:8])}, ...")
        if operator is None:
            found |= {name: (name,) for name in names}
        else:
            found[operator] = names
    for operator in found:
        operator_name(operator)
    return found


class _OperatorRecording:
    """Gives outputs to the recorder, with what the user's functions say of them."""

    def __init__(
        self,
        recorder: Recorder,
        attributes: Callable[[], Attributes] | Attributes,
        mask: Callable[[], torch.Tensor | None] | None,
    ) -> None:
        self.recorder = recorder
        self.guard = HookGuard(recorder, "operator-unusable")
        self._attributes = attributes
        self._mask = mask

    def compare(self, operator: str, train: torch.Tensor, inference: torch.Tensor) -> None:
        """Record two outputs."""
        attributes = self._attributes() if callable(self._attributes) else self._attributes
        mask = None if self._mask is None else self._mask()
        self.recorder.compare_operator(operator, train, inference, mask=mask, attributes=attributes, presampled=True)


class _Isolated:
    """Gives the other module what the watched one was given, which is copied before that one may change it."""

    def __init__(self, recording: _OperatorRecording, operator: str, other: torch.nn.Module) -> None:
        self._recording, self._operator, self._other = recording, operator, other
        self._dtype = next((parameter.dtype for parameter in other.parameters() if parameter.is_floating_point()), None)
        self._calls = 0
        self._held = threading.local()

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the inputs, if this call is in the sample."""

        def keep() -> None:
            self._held.inputs = None
            self._calls += 1
            if not self._recording.recorder.takes((self._operator, id(self), self._calls)):
                return
            if cached := [name for name in _CACHES if kwargs.get(name) is not None]:
                raise ValueError(f"{self._operator} was called with {cached[0]}, which a second call would extend")
            self._held.inputs = self._cast(args), {name: self._cast(value) for name, value in kwargs.items()}

        self._recording.guard.run(keep)

    def after(self, output: Any) -> None:
        """Run the other module on them, and compare."""
        held, self._held.inputs = getattr(self._held, "inputs", None), None
        if held is None:
            return

        def compare() -> None:
            own = output_of(output)
            with torch.autocast(own.device.type, enabled=False):
                theirs = output_of(self._other(*held[0], **held[1]))
            self._recording.compare(self._operator, own, theirs)

        self._recording.guard.run(compare)

    def _cast(self, given: Any) -> Any:
        """A copy in the other module's dtype: it may work in place."""
        if isinstance(given, tuple):
            return tuple(self._cast(item) for item in given)
        if not isinstance(given, torch.Tensor):
            return given
        if self._dtype is None or not given.is_floating_point():
            return given.clone()
        return given.to(self._dtype, copy=True)


class _Before(UnpicklableHook):
    """Called before the watched module's forward."""

    def __init__(self, isolated: _Isolated) -> None:
        self._isolated = isolated

    def __call__(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._isolated.before(args, kwargs)


class _After(UnpicklableHook):
    """Called after the watched module's forward."""

    def __init__(self, isolated: _Isolated) -> None:
        self._isolated = isolated

    def __call__(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._isolated.after(output)


class _Slot:
    """Slot in which the output of one model's module waits for that of the other's."""

    def __init__(self, recording: _OperatorRecording, operator: str) -> None:
        self.recording = recording
        self._operator = operator
        self._calls = 0
        self._waiting: list[Any] = [None, None]

    def put(self, side: int, output: Any) -> None:
        """Compare with the other side's output, or wait for it; the first side decides by the sampling."""
        other = self._waiting[1 - side]
        if other is None:
            if self._waiting[side] not in (None, _NOT_SAMPLED):
                self.recording.recorder.drop(
                    "operator-unpaired", f"{self._operator} ran twice on one side; call the two models in turn"
                )
            self._calls += 1
            sampled = self.recording.recorder.takes((self._operator, id(self), self._calls))
            self._waiting[side] = output_of(output).detach().clone() if sampled else _NOT_SAMPLED
            return
        self._waiting[1 - side] = None
        if other is not _NOT_SAMPLED:
            pair = (other, output_of(output)) if side == 1 else (output_of(output), other)
            self.recording.compare(self._operator, *pair)


class _InSitu(UnpicklableHook):
    """Puts a module's output where the other model's is waited for."""

    def __init__(self, slot: _Slot, side: int) -> None:
        self._slot, self._side = slot, side

    def __call__(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._slot.recording.guard.run(lambda: self._slot.put(self._side, output))
