"""Actions at each boundary while a kernel runs some sequences: outputs are taken, then replaced or added to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

from kc_otel._extras import extra
from kc_otel.diagnose.boundaries import INPUT_OF, OUTPUT, Boundary
from kc_otel.diagnose.token_sequences import TokenSequence

with extra("torch", "locating in a kernel"):
    import torch

Activations = dict[Boundary, list[torch.Tensor]]
"""By boundary, in the order of execution, the output of each sequence, [tokens, features].

Whole numbers are a router's choices: they are handed on with its weights, and are no numbers to compare.
"""
_HEADS_FIRST: Final = frozenset({"rotary", "kv_cache"})
"""Operators whose outputs are [sequences, heads, tokens, ...] even where there are as many heads as tokens."""
_IN_PARTS: Final = frozenset({"rotary"})
"""Operators of an engine with several outputs; of others the first counts: a residual or a bias is handed on beside it.
"""


class Visit:
    """The actions, whatever the layout; `_segments`: sequence, first position, and place in a view of an output."""

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        replaced: Activations | None,
        added: Activations | None = None,
        *,
        taken: bool,
    ) -> None:
        self._sequences, self.is_taken = sequences, taken
        self._replaced, self._added = replaced or {}, added or {}
        self.found: Activations = {}
        self.layer: int | None = None
        self._segments: list[tuple[int, int, Any]] = []

    def __call__(self, boundary: Boundary, output: Any) -> Any:
        """Take an output; returns the one to go on with, or None for the same."""
        raise NotImplementedError

    @contextmanager
    def of_modules(self, module: torch.nn.Module, named: Mapping[str, Boundary]) -> Iterator[None]:
        """Visit the outputs of named modules, and inputs that are an operator's output where no module gives that."""
        known, by_module = set(named.values()), dict[torch.nn.Module, dict[int | None, Boundary]]()
        with ExitStack() as stack:
            for name, boundary in named.items():
                submodule = module.get_submodule(name)
                by_module.setdefault(submodule, {})[boundary.layer] = boundary
                if boundary.operator == "block":
                    stack.callback(submodule.register_forward_pre_hook(partial(self._enter, boundary.layer)).remove)
            for submodule, at in by_module.items():
                stack.callback(submodule.register_forward_hook(partial(self._after, at)).remove)
                before = {
                    layer: Boundary(layer, earlier)
                    for layer, boundary in at.items()
                    if (earlier := INPUT_OF.get(boundary.operator)) and Boundary(layer, earlier) not in known
                }
                if before:
                    stack.callback(submodule.register_forward_pre_hook(partial(self._before, before)).remove)
            yield

    def _enter(self, layer: int | None, *_: Any) -> None:
        self.layer = layer

    def _running(self, at: Mapping[int | None, Boundary]) -> Boundary:
        return at[self.layer if len(at) > 1 else next(iter(at))]

    def _after(self, at: Mapping[int | None, Boundary], _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return self(self._running(at), output)

    def _before(self, at: Mapping[int | None, Boundary], _: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        changed = self(self._running(at), args[0]) if args else None
        return None if changed is None else (changed, *args[1:])

    def _home(self, key: Boundary) -> list[torch.Tensor]:
        return self.found.setdefault(key, [torch.empty(0)] * len(self._sequences))

    def _take(self, key: Boundary, view: torch.Tensor) -> None:
        home = self._home(key)
        for row, first, where in self._segments:
            part = view[where].flatten(1).detach()
            if not len(home[row]):
                home[row] = part.new_zeros(len(self._sequences[row].token_ids), part.shape[1])
            home[row][first : first + len(part)] = part

    def _changed(
        self, key: Boundary, output: torch.Tensor, view_of: Callable[[torch.Tensor], torch.Tensor], *, blank: bool
    ) -> torch.Tensor | None:
        """Return the output to go on with, `blank` where it is no sequence's; None for the same."""
        new = (self._replaced or self._added).get(key)
        if new is None:
            return None
        written = bool(self._replaced) or not output.is_floating_point()
        changed = output.clone(memory_format=torch.contiguous_format)
        if blank and self._replaced:
            changed.zero_()
        view = view_of(changed)
        for row, first, where in self._segments:
            target = view[where]
            value = new[row][first : first + len(target)]
            if value.numel() != target.numel():
                return None
            value = value.to(device=target.device, dtype=torch.float32).reshape(target.shape)
            target.copy_(value if written else target.float() + value)
        return changed


class TorchVisit(Visit):
    """Of a torch module, whose outputs have all sequences of a batch, padded on the right."""

    _shape = (0, 0)

    def begin(self, rows: Sequence[int], width: int) -> None:
        """Begin a forward over some sequences, padded to `width` tokens."""
        self._shape = len(rows), width
        lengths = [len(self._sequences[row].token_ids) for row in rows]
        self._segments = [(row, 0, (place, slice(lengths[place]))) for place, row in enumerate(rows)]
        self._parts: Counter[Boundary] = Counter()

    def __call__(self, boundary: Boundary, output: Any) -> Any:
        """Take a module's output; returns the one to go on with, or None for the same."""
        if isinstance(output, tuple | list):
            members = [self(boundary, member) if isinstance(member, torch.Tensor) else None for member in output]
            if all(member is None for member in members):
                return None
            return type(output)(old if new is None else new for old, new in zip(output, members, strict=True))
        if not isinstance(output, torch.Tensor) or output.dtype == torch.bool:
            return None
        if not output.is_floating_point() and boundary.operator != "router":
            return None
        batch, width = self._shape
        if output.ndim > 2 and output.shape[:2] == (1, width):  # the same for every sequence, as angles are
            output = output.expand(batch, *output.shape[1:])
        view_of = self._axes(output.shape, heads_first=boundary.operator in _HEADS_FIRST)
        if view_of is None:
            return None
        key = replace(boundary, part=self._parts[boundary])
        self._parts[boundary] += 1
        if self.is_taken:
            self._take(key, view_of(output))
        # Padding gets nothing of a kernel whose numbers may not be finite: masked attention would pass NaN on.
        return self._changed(key, output, view_of, blank=True)

    def _axes(self, shape: torch.Size, *, heads_first: bool) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function that views a tensor as [sequences, tokens, ...]; None if it does not have these axes."""
        batch, width = self._shape
        has_heads_first = len(shape) == 4 and shape[0] == batch and shape[2] == width
        if has_heads_first and heads_first:
            return lambda tensor: tensor.transpose(1, 2)
        if len(shape) >= 3 and shape[:2] == self._shape:
            return lambda tensor: tensor
        if has_heads_first:
            return lambda tensor: tensor.transpose(1, 2)
        if len(shape) >= 2 and shape[0] == batch * width:
            return lambda flat: flat.view(batch, width, *shape[1:])
        return None


class EngineVisit(Visit):
    """Of a live vLLM, whose outputs have a row for each token of the requests that run.

    Logits are replaced only on their way to the sampler; with `sampled` the sampler's are taken. `ended` has place in
    the batch, sequence and tokens of the requests that end in this forward.
    """

    def __init__(
        self, sequences: Sequence[TokenSequence], replaced: Activations | None, *, taken: bool, sampled: bool = False
    ) -> None:
        super().__init__(sequences, replaced, taken=taken)
        self._is_sampled = sampled
        self.wants_logits: Final = not sampled
        self.rows = 0
        self.ended: list[tuple[int, int, int]] = []
        self._row_of: Mapping[int, int | None] = {}
        self._requests: list[tuple[int | None, int]] = []
        self._sampled: list[torch.Tensor] = [torch.empty(0)] * len(sequences)

    def prompt(self, row: int) -> tuple[int, ...]:
        """Tokens of a sequence that are prefilled: all of its prompt."""
        sequence = self._sequences[row]
        return tuple(sequence.token_ids[: max(sequence.prompt_tokens, 1)])

    def steps(self, row: int) -> int:
        """Tokens that are decoded, so that each token of the sequence runs through the layers."""
        return len(self._sequences[row].token_ids) - len(self.prompt(row)) + 1

    def begin(self, row_of: Mapping[int, int | None]) -> None:
        """A batch: the sequence of each request, by the request's number; None for one that is none of ours."""
        self._row_of = row_of

    def forward(self, numbers: Sequence[int], ends: Sequence[int], firsts: Sequence[int]) -> None:
        """Begin a forward: first rows of requests and the end in `ends`, positions of those rows in `firsts`."""
        spans = [slice(start, stop) for start, stop in pairwise(ends)]
        running = [*zip(map(self._row_of.get, numbers), firsts, spans, strict=True)]
        self._segments = [(row, first, span) for row, first, span in running if row is not None]
        self._requests = [(row, first + span.stop - span.start) for row, first, span in running]
        self.rows = ends[-1]
        self.ended = [
            (place, row, end)
            for place, (row, end) in enumerate(self._requests)
            if row is not None and end == len(self._sequences[row].token_ids)
        ]

    def __call__(self, boundary: Boundary, output: Any) -> Any:
        """Take an output, [rows, ...]; returns the one to go on with, or None for the same."""
        if isinstance(output, tuple):
            return self._tuple(boundary, output)
        if not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.ndim < 2:
            return None
        if len(output) < self.rows:
            return None
        if self.is_taken or boundary == OUTPUT:
            self._take(boundary, output[: self.rows].flatten(1).float().cpu())
        return (
            None if boundary == OUTPUT else self._changed(boundary, output, lambda rows: rows.flatten(1), blank=False)
        )

    def cache(self, boundary: Boundary, row: int, found: Sequence[torch.Tensor]) -> None:
        """Keys and values as they are read back, [tokens, features] each."""
        for part, values in enumerate(found):
            self._home(replace(boundary, part=part))[row] = values

    def sample(self, sampler: Any, logits: torch.Tensor, metadata: Any) -> None:
        """Record the sampler's processing of logits [requests, vocabulary] that replace the engine's."""
        if not self._is_sampled:
            return
        ends = [(row or 0, end) for row, end in self._requests]
        given = torch.stack([self._replaced[OUTPUT][row][end - 1] for row, end in ends]).to(logits.device)
        asked = replace(metadata, max_num_logprobs=1)
        made = sampler.sample(sampler.apply_logits_processors(given, asked, False), asked)[1]
        for place, (row, end) in enumerate(ends):
            prompt = len(self.prompt(row))
            if not len(self._sampled[row]):
                completion = len(self._sequences[row].token_ids) - prompt
                self._sampled[row] = torch.zeros(completion, made.shape[1])
            if prompt <= end < len(self._sequences[row].token_ids):
                self._sampled[row][end - prompt] = made[place].float().cpu()

    def force(self, token_ids: torch.Tensor) -> None:
        """Write the tokens that came over those that were sampled, int [requests, 1]."""
        for place, (row, following) in enumerate(self._requests):
            if row is not None and following < len(self._sequences[row].token_ids):
                token_ids[place, 0] = self._sequences[row].token_ids[following]

    def outputs(self) -> tuple[Activations, list[torch.Tensor]]:
        """Return the outputs taken at boundaries that every token of every sequence has passed, and the logits."""
        logits = self._home(OUTPUT)
        whole = {
            key: values
            for key, values in self.found.items()
            if key != OUTPUT
            and all(len(value) == len(asked.token_ids) for value, asked in zip(values, self._sequences, strict=True))
        }
        return {**whole, OUTPUT: logits} if self.is_taken else whole, logits

    def sampled(self) -> list[torch.Tensor]:
        """Log-probabilities [completion, vocabulary] of each sequence."""
        return self._sampled

    def _tuple(self, boundary: Boundary, output: tuple[Any, ...]) -> Any:
        if boundary.operator == "block" and len(output) == 2 and isinstance(output[1], torch.Tensor):
            # A block hands on its output and the residual apart; their sum is what it is elsewhere.
            changed = self(boundary, output[0].float() + output[1].float())
            return None if changed is None else (changed.to(output[0].dtype), torch.zeros_like(output[1]))
        parts = len(output) if boundary.operator in _IN_PARTS else 1
        members = [self(replace(boundary, part=part), output[part]) for part in range(parts)]
        if all(member is None for member in members):
            return None
        given = [old if new is None else new for old, new in zip(output, members, strict=False)]
        return (*given, *output[parts:])
