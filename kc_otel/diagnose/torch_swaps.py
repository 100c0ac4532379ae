"""Components swapped: the inference kernel's errors put into the training kernel's forward, and what that does.

An operator's error is what it gives on the training kernel's inputs beyond what the training kernel's own operator
gives. Put in alone it is exact; of several at once each is taken as it was measured, though the inputs of those further
down have changed by then. How much of the drift that leaves unexplained is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.diagnose.boundaries import SAMPLER, Boundary
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.diagnose.torch_measure import chunks_of, inputs_as_seen
from kc_otel.diagnose.watched_kernel import WatchedKernel

with extra("torch", "locating in a torch module"):
    import torch

PerToken = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From log-probabilities P and Q [tokens, vocabulary] and the tokens that came next [tokens], each token's drift."""


def token_drift(
    train: TorchKernel,
    inference: WatchedKernel,
    sequences: Sequence[TokenSequence],
    per_token: PerToken,
    above: Sequence[Boundary],
    *,
    batch_tokens: int,
) -> tuple[Callable[[frozenset[Boundary]], NDArray[np.float64]], NDArray[np.float64]]:
    """Drift of the next-token distribution with the errors of some operators put into the training kernel.

    Returns a function from boundaries, of those `above`, to the mean drift of each sequence, and the drift of the
    inference kernel as it runs.
    """
    chunks = []
    whole = []
    wanted = {replace(boundary, part=0) for boundary in above}
    for chunk in chunks_of(sequences, batch_tokens):
        together = [list(range(len(chunk)))]
        own, own_logits = train.run(chunk, together)
        forced, _ = inference.run(chunk, together, replaced=own)
        expected = inputs_as_seen(train, inference, chunk, own, forced)
        _, ran_logits = inference.run(chunk, together, taken=False)
        errors = {
            key: [
                b.float() - a.float() if a.is_floating_point() else b
                for a, b in zip(expected[key], forced[key], strict=True)
            ]
            for key in own
            if replace(key, part=0) in wanted
            and key in forced
            and all(a.shape == b.shape for a, b in zip(own[key], forced[key], strict=True))
        }
        ours = train.distributions(chunk, own_logits)
        chunks.append((chunk, together, errors, ours))
        whole.append(_drifts(ours, inference.distributions(chunk, ran_logits), chunk, per_token))

    def with_errors(boundaries: frozenset[Boundary]) -> NDArray[np.float64]:
        found = []
        swapped = {replace(boundary, part=0) for boundary in boundaries}
        for chunk, together, errors, ours in chunks:
            added = {
                key: values
                for key, values in errors.items()
                if key in boundaries or (not values[0].is_floating_point() and replace(key, part=0) in swapped)
            }
            _, logits = train.run(chunk, together, added=added, taken=False)
            samples: WatchedKernel = inference if SAMPLER in boundaries else train
            found.append(_drifts(ours, samples.distributions(chunk, logits), chunk, per_token))
        return np.concatenate(found)

    return with_errors, np.concatenate(whole)


def _drifts(
    ours: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    sequences: Sequence[TokenSequence],
    per_token: PerToken,
) -> NDArray[np.float64]:
    return np.asarray(
        [
            float(per_token(p, q, torch.as_tensor(sequence.token_ids[-len(p) :])).mean())
            for p, q, sequence in zip(ours, theirs, sequences, strict=True)
        ]
    )


def token_tv(p: torch.Tensor, q: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Total variation of each token's distribution."""
    drift = 0.5 * (p.exp() - q.exp()).abs().sum(-1)
    return drift.nan_to_num(nan=1.0)  # a kernel without numbers is as far away as can be


def token_log_ratio(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """|log P - log Q| of the tokens that came next, nats; at most 50, so that what is never sampled has a number."""
    chosen = tokens[:, None]
    ratio = (p.gather(1, chosen) - q.gather(1, chosen)).squeeze(1)
    return ratio.abs().nan_to_num(nan=50.0, posinf=50.0).clamp(max=50.0)
