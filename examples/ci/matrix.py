"""Three trainers' number formats beside three rollouts', each pair sampled and scored on the spot, as one table.

    python -m examples.ci.matrix [matrix.html]

The policies and the contract are those of the gate; the HTML file has the picture.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from examples.ci.record import record
from kc_otel.recordings import save_recording

CONTRACT = Path(__file__).parent / "contract.yaml"
TRAINERS, ROLLOUTS = ("float32", "bfloat16", "float16"), ("bfloat16", "float16", "int4")


def main(page: list[str]) -> int:
    """Record every pair and judge them; the command's exit code."""
    with tempfile.TemporaryDirectory(prefix="kc-otel-matrix-") as folder:
        pairs = []
        for trainer in TRAINERS:
            for rollout in ROLLOUTS:
                file = Path(folder) / f"{trainer}-{rollout}.npz"
                save_recording(record(rollout, seed=1, trainer=trainer), file)
                pairs.append(f"{trainer}/{rollout}={file}")
        asked = ("gate", "matrix", str(CONTRACT), *pairs, *(("--html", page[0]) if page else ()))
        return subprocess.run([sys.executable, "-m", "kc_otel", *asked], check=False).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
