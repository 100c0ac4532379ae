"""A flow policy whose steps are Gaussian: sampled in bfloat16, trained in float32, and the true distance by quadrature.

    python -m examples.continuous

As in FlowGRPO, an action is reached in a few noisy steps, each of which has a density. Its log is what is compared.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from examples.demo.__main__ import export_to
from examples.demo.evaluator import evaluating
from examples.demo.terminal import Terminal
from kc_otel import Recorder
from kc_otel.client.webhooks import new_secret

CONTRACT = Path(__file__).with_name("contract.yaml")
STEPS, SEQUENCES, BATCHES, WIDTH = 10, 512, 20, 64
NOISE = torch.linspace(0.5, 0.02, STEPS)
"""Standard deviation of each step: the last ones are so small that densities are far above 1."""


class Velocity(torch.nn.Module):
    """Where a step goes: from the observation, where it is, and the time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))

    def means(self, observation: Tensor, at: Tensor, timestep: int, dtype: torch.dtype) -> Tensor:
        """Mean of the next place, float32 [sequences]."""
        time = torch.full_like(at, timestep / STEPS)
        network = self.layers.to(dtype)
        moved = network(torch.stack([observation, at, time], -1).to(dtype))[:, 0].float()
        self.layers.float()
        return at + moved / STEPS


def log_density(value: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Of a Gaussian; it exceeds 0 where the deviation is small."""
    return torch.distributions.Normal(mean, deviation).log_prob(value)


def distances(train: Tensor, inference: Tensor, deviation: Tensor, points: int = 4001) -> Tensor:
    """Total variation of pairs of Gaussians, by quadrature of (q - p)+ over what both have mass on."""
    grid = torch.linspace(-8.0, 8.0, points, dtype=torch.float64)[:, None]
    middle, width = 0.5 * (train + inference).double(), deviation.double()
    at = middle + grid * width
    p, q = (log_density(at, mean.double(), width).exp() for mean in (train, inference))
    return torch.trapezoid((q - p).clamp(min=0.0), dx=16.0 / (points - 1), dim=0) * width


@torch.no_grad()
def run(recorder: Recorder, policy: Velocity) -> dict[str, float]:
    """Sample and score; returns the true mean distance of early and of late steps."""
    truth: dict[str, list[Tensor]] = {"early": [], "late": []}
    for _ in range(BATCHES):
        observation, at = torch.rand(SEQUENCES), torch.randn(SEQUENCES)
        for timestep in range(STEPS):
            train, inference = (
                policy.means(observation, at, timestep, kind) for kind in (torch.float32, torch.bfloat16)
            )
            next_place = inference + NOISE[timestep] * torch.randn(SEQUENCES)
            both = [log_density(next_place, mean, NOISE[timestep])[:, None] for mean in (train, inference)]
            recorder.compare(*both, attributes={"timestep": timestep})
            truth["early" if timestep < STEPS // 2 else "late"].append(distances(train, inference, NOISE[timestep]))
            at = next_place
    return {name: torch.cat(found).mean().item() for name, found in truth.items()}


def main() -> None:
    terminal = Terminal()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="kc-otel-continuous-") as folder,
        evaluating(CONTRACT, Path(folder), "http://127.0.0.1:9/", new_secret()) as evaluator,
    ):
        export_to(evaluator.otlp)
        with Recorder(CONTRACT) as recorder:
            truth = run(recorder, Velocity())
            recorder.force_flush()
            for _ in range(50):
                cells = evaluator.verdicts()
                if max((cell["samples"] for cell in cells), default=0) >= recorder.stats().tokens:
                    break
                time.sleep(0.2)
        terminal.verdicts(cells, {cell["kernel_inference"]: "bfloat16" for cell in cells})
        for name, distance in truth.items():
            terminal.say(f"{name} steps, by quadrature: {distance:.5f}")


if __name__ == "__main__":
    main()
