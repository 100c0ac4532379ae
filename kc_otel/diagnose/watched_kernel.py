"""Interface of a kernel for locating, whatever program runs it: outputs at every boundary, also on other inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kc_otel._extras import extra
from kc_otel.contract.slices import Scalar
from kc_otel.diagnose.boundaries import Boundary
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_kernel import Activations

with extra("torch", "locating in a torch module"):
    import torch


class WatchedKernel(Protocol):
    """A kernel that can be run on given tokens and watched: a torch module, or an engine in this process."""

    @property
    def module(self) -> torch.nn.Module:
        """The model, whose parameters may be looked at."""

    @property
    def named(self) -> Mapping[str, Boundary]:
        """The boundary of each watched module, by the module's name."""

    @property
    def dtype(self) -> torch.dtype:
        """Number format that it computes in."""

    @property
    def encode(self) -> Callable[[Sequence[Mapping[str, str]]], Sequence[int]] | None:
        """Token ids of a conversation; None where sequences are given as tokens."""

    @property
    def vocabulary(self) -> Mapping[str, int] | None:
        """Token to id; None where it is not known."""

    @property
    def sampling(self) -> Mapping[str, Scalar]:
        """Sampling parameters by name."""

    @property
    def only_seen(self) -> frozenset[str]:
        """Operators whose outputs can be observed but not replaced: later operators receive them unchanged."""

    @property
    def has_sampler(self) -> bool:
        """True if a program of its own makes its distributions, and not its sampling parameters alone."""

    def run(
        self,
        sequences: Sequence[TokenSequence],
        batches: Sequence[Sequence[int]],
        *,
        replaced: Activations | None = None,
        taken: bool = True,
        padding: int = 0,
    ) -> tuple[Activations, list[torch.Tensor]]:
        """Outputs by boundary, [tokens, features] of each sequence, and logits [tokens, vocabulary] in float32.

        Every sequence is in one of the batches, by its index; `replaced` replaces an operator's output after it was
        taken; `padding` are tokens of something else in the batch.
        """

    def distributions(self, sequences: Sequence[TokenSequence], logits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Log-probabilities [completion, vocabulary] of each sequence's completion, as sampled from these logits."""
