"""Which matrices of the demo's int8 kernel to keep in bf16, so that its gate passes at the least memory.

```sh
make demo
kc-otel precision examples/demo/contract.yaml examples/demo/precision.py:int8 --own --runs 28
```

Every set that is tried samples completions of held-out text of each slice by itself, the training kernel scores them,
and the gate judges: nothing is predicted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.demo import located
from examples.demo.corpus import SLICES, Text, load_corpus
from examples.demo.model import Model
from examples.demo.sampler import Sampler
from examples.demo.serving import COMPLETION, PROMPT, score
from examples.demo.train import windows
from kc_otel import Contract
from kc_otel.contract.load import load
from kc_otel.judge.verdict import Verdict
from kc_otel.offline.gate.recorded_verdicts import by_contract, judge
from kc_otel.offline.remedy.precision import Component
from kc_otel.recordings import Recording

CONTRACT = Path(__file__).with_name("contract.yaml")
ROWS = 64
"""Completions of each slice in a run."""
CALIBRATION_ROWS = 64
SCALE_BYTES = 4


def components(model: Model) -> list[Component]:
    """Each matrix that int8 replaces; bf16 takes a byte a weight more, and saves a scale per output channel."""
    names = [f"blocks.{at}.{part}" for at in range(model.config.layers) for part in ("qkv", "out", "up", "down")]
    weights = {name: model.get_submodule(name).weight for name in (*names, "head")}
    return [Component(name, each.numel() - SCALE_BYTES * each.shape[0]) for name, each in weights.items()]


class Gate:
    """Runs the int8 kernel with some matrices kept in bf16, and judges what it sampled.

    Args:
        contract: Judges.
        model: The training kernel.
        corpus: The slices' texts.
        calibrated_on: Slices that the int8 scales have seen.
        rows: Completions of each slice in a run.
    """

    def __init__(
        self,
        contract: Contract,
        model: Model,
        corpus: dict[str, Text],
        calibrated_on: Sequence[str] = ("code", "prose"),
        rows: int = ROWS,
    ) -> None:
        self.contract, self.model, self.corpus, self.rows = contract, model, corpus, rows
        texts = [corpus[name].train for name in calibrated_on for _ in range(CALIBRATION_ROWS // len(calibrated_on))]
        self.calibration = windows(texts, model.config.context, torch.Generator().manual_seed(0))
        self.fresh = 1

    def __call__(self, kept: frozenset[str], new: bool) -> tuple[Verdict, ...]:
        """The gate's verdicts; on requests that no run has seen, where they are to be new."""
        self.fresh += new
        seed = self.fresh if new else 1
        tasks = [name for name in SLICES for _ in range(self.rows)]
        prompts = windows([self.corpus[task].held_out for task in tasks], PROMPT, torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        ids, inference = Sampler(self.model, self.calibration, kept).generate(prompts, COMPLETION)
        train = score(self.model, prompts, ids)
        recording = Recording(
            train.double().numpy().ravel(),
            inference.double().numpy().ravel(),
            np.full(len(tasks), COMPLETION),
            tuple({"task": task} for task in tasks),
        )
        return judge(self.contract, by_contract(recording, self.contract), time.time()).verdicts


def int8() -> tuple[list[Component], Gate]:
    """What can be kept of the demo's int8 kernel, and its gate."""
    model = located.train()
    return components(model), Gate(load(CONTRACT), model, load_corpus())
