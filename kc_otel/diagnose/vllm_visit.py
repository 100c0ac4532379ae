"""Actions at each boundary of a live vLLM: rows of its batches are taken, replaced, and sorted by sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kc_otel._extras import extra
from kc_otel.diagnose.boundaries import OUTPUT, Boundary
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_kernel import Activations

with extra("torch", "locating in an engine"):
    import torch

_IN_PARTS: Final = frozenset({"rotary"})
"""Operators with several outputs; of others the first counts: beside it a residual or a bias is handed on."""


class EngineVisit:
    """Actions on some sequences while an engine runs them; an unknown prompt is the first token.

    Outputs are replaced after they were taken, logits only on their way to the sampler; with `sampled` the sampler's
    are taken. `ended` has place in the batch, sequence and tokens of the requests that end in this forward.
    """

    def __init__(
        self, sequences: Sequence[TokenSequence], replaced: Activations | None, *, taken: bool, sampled: bool = False
    ) -> None:
        self._sequences, self._replaced = sequences, replaced or {}
        self.is_taken, self._is_sampled = taken, sampled
        self.wants_logits: Final = not sampled
        self.layer: int | None = None
        self.rows = 0
        self.ended: list[tuple[int, int, int]] = []
        self._row_of: Mapping[int, int | None] = {}
        self._segments: list[tuple[int | None, int, int, int]] = []
        self._found: Activations = {}
        self._logits: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
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
        self._segments = [
            (self._row_of.get(number), first, start, stop)
            for number, first, start, stop in zip(numbers, firsts, ends[:-1], ends[1:], strict=True)
        ]
        self.rows = ends[-1]
        self.ended = [
            (place, row, first + stop - start)
            for place, (row, first, start, stop) in enumerate(self._segments)
            if row is not None and first + stop - start == len(self._sequences[row].token_ids)
        ]

    def __call__(self, boundary: Boundary, output: Any) -> Any:
        """Take an output, [rows, ...]; returns the one to go on with, or None for the same."""
        if isinstance(output, tuple):
            return self._tuple(boundary, output)
        if not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.ndim < 2:
            return None
        if len(output) < self.rows:
            return None
        self._take(boundary, output[: self.rows].flatten(1))
        return self._changed(boundary, output)

    def cache(self, boundary: Boundary, row: int, found: Sequence[torch.Tensor]) -> None:
        """Keys and values as they are read back, [tokens, features] each."""
        for part, values in enumerate(found):
            self._home(replace(boundary, part=part))[row] = values

    def sample(self, sampler: Any, logits: torch.Tensor, metadata: Any) -> None:
        """Record the sampler's processing of logits [requests, vocabulary] that replace the engine's."""
        if not self._is_sampled:
            return
        ends = [(row or 0, first + stop - start) for row, first, start, stop in self._segments]
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
        for place, (row, first, start, stop) in enumerate(self._segments):
            following = first + stop - start
            if row is not None and following < len(self._sequences[row].token_ids):
                token_ids[place, 0] = self._sequences[row].token_ids[following]

    def outputs(self) -> tuple[Activations, list[torch.Tensor]]:
        """Return the outputs taken at boundaries that every token of every sequence has passed, and the logits."""
        whole = {
            key: values
            for key, values in self._found.items()
            if all(len(value) == len(asked.token_ids) for value, asked in zip(values, self._sequences, strict=True))
        }
        return {**whole, OUTPUT: self._logits} if self.is_taken else whole, self._logits

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

    def _take(self, boundary: Boundary, values: torch.Tensor) -> None:
        if boundary == OUTPUT:
            self._put(self._logits, values)
        elif self.is_taken:
            self._put(self._home(boundary), values)

    def _home(self, boundary: Boundary) -> list[torch.Tensor]:
        return self._found.setdefault(boundary, [torch.empty(0)] * len(self._sequences))

    def _put(self, home: list[torch.Tensor], values: torch.Tensor) -> None:
        rows = values.detach().float().cpu()
        for row, first, start, stop in self._segments:
            if row is None:
                continue
            if not len(home[row]):
                home[row] = torch.zeros(len(self._sequences[row].token_ids), rows.shape[1])
            home[row][first : first + stop - start] = rows[start:stop]

    def _changed(self, boundary: Boundary, output: torch.Tensor) -> Any:
        new = self._replaced.get(boundary)
        if new is None or boundary == OUTPUT:
            return None
        features = output[0].numel()
        if any(row is not None and new[row].shape[-1] != features for row, *_ in self._segments):
            return None
        changed = output.clone()
        view = changed.view(len(output), features)
        for row, first, start, stop in self._segments:
            if row is not None:
                view[start:stop] = new[row][first : first + stop - start].to(view)
        return changed
