"""Which matrices of the demo's int8 kernel to keep in bf16, so that its gate passes at the least memory.

```sh
python -m examples.demo --weights demo.pt
python -m examples.demo.precision demo.pt
```

Every set that is tried samples completions of held-out text of each slice by itself, the training kernel scores them,
and the gate judges: nothing is predicted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from examples.demo.corpus import SLICES, Text, load_corpus
from examples.demo.model import Config, Model
from examples.demo.sampler import Sampler
from examples.demo.serving import COMPLETION, PROMPT, score
from examples.demo.train import windows
from kc_otel import Contract
from kc_otel.contract.load import load
from kc_otel.judge.verdict import Verdict
from kc_otel.offline.gate.recorded_verdicts import by_contract, judge
from kc_otel.offline.remedy.precision import Component, PrecisionRemedy, cheapest
from kc_otel.recordings import Recording

CONTRACT = Path(__file__).with_name("contract.yaml")
ROWS = 64
"""Completions of each slice in a run."""
CALIBRATION_ROWS = 64
RUNS = 28
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


def shown(of: PrecisionRemedy) -> str:
    """What each matrix gives back alone, and what to keep."""
    worst = of.worst
    lines = [f"int8: {worst.cell.clause} on {worst.cell.slice} is {worst.estimate:.3g}, limit {worst.limit:.3g}"]
    lines += [
        f"  {', '.join(trial.kept):14} gives back {of.gives_back(trial):+.4f} for {trial.bytes:,} bytes"
        for trial in sorted(of.alone, key=of.gives_back, reverse=True)
    ]
    if of.found is None or of.verified is None:
        return "\n".join([*lines, f"no set of them passes ({of.runs} runs)"])
    proven = "every cheaper set was run" if of.proven else f"the cheapest of {of.runs} runs"
    kept = ", ".join(sorted(of.found.kept)) or "nothing"
    again = of.verified.of(worst.cell)
    return "\n".join(
        [
            *lines,
            f"keep {kept} in bf16 (+{of.found.bytes:,} bytes), {proven}; gate passes on new requests:",
            f"  {worst.cell.clause} on {worst.cell.slice} is {again.estimate:.3g}, at most {again.upper:.3g}",
        ]
    )


def main() -> None:
    """Search, and print what to keep."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("weights", nargs="?", default="demo.pt", help="written by examples.demo --weights")
    model = Model(Config())
    model.load_state_dict(torch.load(parser.parse_args().weights, weights_only=True))
    gate = Gate(load(CONTRACT), model.eval(), load_corpus())
    start = time.perf_counter()
    found = cheapest(components(model), gate, most=RUNS)
    print(shown(found))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
