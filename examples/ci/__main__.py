"""A gate in CI, on two recordings made on the spot: it lets a bfloat16 kernel on, and refuses one of 4 bits.

    python -m examples.ci

Prints the commands, what they print, their exit codes, and the summary that a reviewer reads; a few seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.ci.record import record
from kc_otel.recordings.recording_files import save_recording

CONTRACT = Path(__file__).parent / "contract.yaml"


def kc_otel(folder: Path, *arguments: str) -> int:
    """Run the command line in a folder, show it, and return its exit code."""
    print(f"$ kc-otel {' '.join(arguments)}", flush=True)
    quiet = {name: value for name, value in os.environ.items() if name != "GITHUB_STEP_SUMMARY"}
    command = [sys.executable, "-m", "kc_otel", *arguments]
    done = subprocess.run(command, cwd=folder, env=quiet, check=False)  # noqa: S603 - its own arguments
    print(f"(exit code {done.returncode})\n", flush=True)
    return done.returncode


def main() -> int:
    """Both kernels through the gate; 0 when the gate tells them apart."""
    with tempfile.TemporaryDirectory(prefix="kc-otel-ci-") as name:
        folder = Path(name)
        (folder / "contract.yaml").write_text(CONTRACT.read_text(encoding="utf-8"), encoding="utf-8")
        kc_otel(folder, "gate", "plan", "contract.yaml")
        codes = {}
        for kernel, file in (("bfloat16", "good.npz"), ("int4", "bad.npz")):
            save_recording(record(kernel, seed=1), folder / file)
            codes[kernel] = kc_otel(
                folder,
                *("gate", "run", "contract.yaml", file),
                *("--kernel", f"inference.extra.weights={kernel}", "--junit", f"{kernel}.xml"),
                *("--markdown", f"{kernel}.md", "--evidence", kernel),
            )
        kc_otel(folder, "gate", "verify", "int4", "--recordings", "bad.npz")
        print((folder / "int4.md").read_text(encoding="utf-8"))
    return int(codes != {"bfloat16": 0, "int4": 1})


if __name__ == "__main__":
    sys.exit(main())
