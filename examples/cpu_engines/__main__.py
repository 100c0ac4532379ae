"""Sample from an engine of the CPU with integer weights, score the same tokens in float32, and ask the gate.

    make engines && .venv-engines/bin/python -m examples.cpu_engines onnxruntime

Engines: `onnxruntime` (its matrices in float32, then in int8) and `llama.cpp` (GGUF in F16, Q8_0, Q4_0, by its server's
log-probabilities). What each needs is in README.md. Writes a recording of each format, and judges all of them by
contract.yaml.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from examples.tiny_model import prompts, tiny_model

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = Path(__file__).with_name("contract.yaml")
SLICES = ("code", "tables")
EACH, PROMPT_TOKENS, TOKENS = 120, 24, 24
NEEDS = {
    "onnxruntime": ("onnxruntime", "onnxscript", "transformers"),
    "llama.cpp": ("gguf", "xllamacpp", "transformers"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the example; the exit status is the gate's of the narrowest format."""
    parser = argparse.ArgumentParser(prog="python -m examples.cpu_engines")
    parser.add_argument("engine", choices=NEEDS)
    parser.add_argument("--out", type=Path, help="folder for recordings and evidence; else one that is removed")
    options = parser.parse_args(arguments)
    missing = [name for name in NEEDS[options.engine] if find_spec(name) is None]
    if missing:
        print(f"this needs {', '.join(missing)}: see examples/cpu_engines/README.md", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="kc-otel-") as name:
        folder = options.out or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        status = 0
        for dtype, recording in recorded(options.engine, tiny_model(ROOT / ".cache"), folder):
            status = gate(recording, folder, options.engine, dtype)
    return status


def recorded(engine: str, checkpoint: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Number formats of an engine, and a recording of each beside the checkpoint in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - --help needs none of it

    from kc_otel.recordings.scoring import hf_scorer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    texts = [text for slice in SLICES for text in prompts(slice, EACH)]
    begun = np.array([tokenizer(text)["input_ids"][:PROMPT_TOKENS] for text in texts])
    if engine == "onnxruntime":
        from examples.cpu_engines.onnx_kernel import sampled  # noqa: PLC0415
    else:
        from examples.cpu_engines.llama_kernel import sampled  # noqa: PLC0415
    for dtype, tokens, inference in sampled(model, checkpoint, begun, TOKENS, folder):
        train = np.stack(hf_scorer(model)(list(begun), list(tokens)))
        task = np.repeat(SLICES, EACH)
        path = folder / f"{dtype}.npz"
        arrays: dict[str, Any] = {"train_logprobs": train, "inference_logprobs": inference, "task": task}
        np.savez(path, token_ids=tokens, **arrays)
        yield dtype, path


def gate(recording: Path, folder: Path, engine: str, dtype: str) -> int:
    """`kc-otel gate run`, in this process; its exit status."""
    from kc_otel.cli import app, register  # noqa: PLC0415

    register(app, "gate")
    command = ["gate", "run", str(CONTRACT), str(recording), "--evidence", str(folder / dtype)]
    command += ["--kernel", f"inference.extra.runtime={engine}", "--kernel", f"inference.dtype={dtype}"]
    print(f"\n$ kc-otel gate run contract.yaml {recording.name} --kernel inference.dtype={dtype}", flush=True)
    return int(app(command, standalone_mode=False) or 0)


if __name__ == "__main__":
    sys.exit(main())
