"""Policy gradient in plain torch: a float32 trainer, a sampler in bfloat16 and one in int4, one contract.

    python -m examples.plain_torch

Needs torch alone and takes about half a minute on a CPU. The lines that watch are those with `recorder`; the verdicts
come from a `kc-otel serve` of its own.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.demo.__main__ import export_to
from examples.demo.evaluator import Evaluator, evaluating
from examples.demo.terminal import Terminal
from kc_otel import Kernel, Recorder
from kc_otel.client.webhooks import new_secret

CONTRACT = Path(__file__).with_name("contract.yaml")
VOCABULARY, CONTEXT, WIDTH, TOKENS, SEQUENCES, STEPS = 32, 4, 128, 24, 64, 120
TASKS = ("count", "even")


class Policy(nn.Module):
    """Next-token logits [sequences, vocabulary] from the task, the position and the last tokens [sequences, inputs]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY + len(TASKS) + TOKENS + 2, WIDTH // 4)
        self.layers = nn.Sequential(
            nn.Linear((CONTEXT + 2) * WIDTH // 4, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, context: Tensor) -> Tensor:
        """Logits [sequences, vocabulary]."""
        return self.head(self.layers(self.embedding(context).flatten(1)))


def bfloat16(policy: Policy) -> Policy:
    """The same weights in bfloat16."""
    return copy.deepcopy(policy).bfloat16()


def int4(policy: Policy) -> Policy:
    """The same weights in four bits, with one scale for a whole matrix: its largest weight decides."""
    quantised = copy.deepcopy(policy)
    with torch.no_grad():
        for weight in (module.weight for module in quantised.modules() if isinstance(module, nn.Linear)):
            scale = weight.abs().max() / 7
            weight.copy_((weight / scale).round() * scale)
    return quantised


def contexts(task: Tensor, tokens: Tensor) -> Tensor:
    """What each position sees, [sequences, tokens + 1, inputs]; before the beginning there is token 0."""
    padded = torch.cat([tokens.new_zeros(len(tokens), CONTEXT), tokens], 1)
    marker = (VOCABULARY + task)[:, None, None].expand(-1, tokens.shape[1] + 1, 1)
    position = (VOCABULARY + len(TASKS) + torch.arange(tokens.shape[1] + 1))[:, None].expand(len(tokens), -1, 1)
    return torch.cat([marker, position, padded.unfold(1, CONTEXT, 1)], 2)


@torch.no_grad()
def sample(kernel: Policy, task: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and log Q of each, [sequences, tokens]."""
    tokens = torch.randint(VOCABULARY, (len(task), 1))
    logprobs = []
    for _ in range(TOKENS):
        now = kernel(contexts(task, tokens)[:, -1]).float().log_softmax(-1)
        chosen = torch.multinomial(now.exp(), 1)
        tokens = torch.cat([tokens, chosen], 1)
        logprobs.append(now.gather(1, chosen))
    return tokens, torch.cat(logprobs, 1)


def reward(task: Tensor, tokens: Tensor) -> Tensor:
    """Share of tokens that do what the task asks, [sequences]."""
    follows = tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCABULARY
    even = tokens[:, 1:] % 2 == 0
    return torch.where(task == 0, follows.float().mean(1), even.float().mean(1))


def train(policy: Policy, quantise: Callable[[Policy], Policy], recorder: Recorder) -> Iterator[float]:
    """Sample, compare, step; yields the mean reward of every step."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    for step in range(STEPS):
        kernel, synced = quantise(policy), step  # a sampler elsewhere: its weights, and the step that they are from
        task = torch.randint(len(TASKS), (SEQUENCES,))
        tokens, sampled = sample(kernel, task)
        logits = policy(contexts(task, tokens)[:, 1:-1].flatten(0, 1))
        logprobs = logits.log_softmax(-1).gather(1, tokens[:, 1:].reshape(-1, 1)).view(SEQUENCES, TOKENS)
        rewards = reward(task, tokens)
        means = torch.stack([rewards[task == kind].mean() for kind in range(len(TASKS))])
        advantages = rewards - means[task]
        recorder.compare(
            logprobs,
            sampled,
            token_ids=tokens[:, 1:],
            advantages=advantages,
            attributes=[{"task": TASKS[kind]} for kind in task],
            weights=(step, synced),
        )
        loss = -(advantages[:, None] * (logprobs - sampled).detach().exp() * logprobs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield rewards.mean().item()


def settled(evaluator: Evaluator, recorder: Recorder) -> list[dict]:
    """The verdicts once everything that was recorded has been judged."""
    recorder.force_flush()
    for _ in range(50):
        cells = evaluator.verdicts()
        judged = sum(v["samples"] for v in cells if (v["clause"], v["slice"]) == ("token-tv", "all"))
        if judged >= recorder.stats().tokens:
            break
        time.sleep(0.2)
    return cells


def main() -> None:
    terminal, names = Terminal(), {}
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="kc-otel-plain-") as folder,
        evaluating(CONTRACT, Path(folder), "http://127.0.0.1:9/", new_secret()) as evaluator,
    ):
        export_to(evaluator.otlp)
        with Recorder(CONTRACT) as recorder:
            for name, quantise in (("bfloat16", bfloat16), ("int4", int4)):
                kernel = Kernel("torch", version=torch.__version__, dtype=name)
                names[kernel.fingerprint] = name
                recorder.rollout(inference=kernel)
                torch.manual_seed(0)
                rewards = list(train(Policy(), quantise, recorder))
                terminal.say(f"{STEPS} steps with a sampler in {name}: reward {rewards[0]:.2f} to {rewards[-1]:.2f}")
            cells = settled(evaluator, recorder)
        terminal.verdicts([v for v in cells if v["kernel_inference"] in names], names)


if __name__ == "__main__":
    main()
