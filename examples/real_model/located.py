"""What `kc-otel locate run` says of two faults in the real model, and what it takes.

`rope` is the checkpoint with another base of its angles in config.json, `int8` the one with W8A8 projections.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from examples.real_model.figures import read
from examples.real_model.kernels import held
from examples.real_model.measure import MODEL, model_here
from examples.real_model.prompts import prompts

CONTRACT: Final = Path(__file__).with_name("grpo.yaml")
FAULTS: Final = ("rope", "int8")
SEQUENCES, TOKENS = 6, 32
_OTHER_BASE: Final = 10_000.0


def located(fault: str, study: Path) -> dict[str, Any]:
    """The culprit and its share, with the command's time and its largest memory."""
    with tempfile.TemporaryDirectory(prefix="kc-otel-located-") as name:
        return _located(fault, study, Path(name))


def _located(fault: str, study: Path, work: Path) -> dict[str, Any]:
    checkpoint = model_here()[1]
    faulty = held("int8", checkpoint, MODEL) if fault == "int8" else other_base(checkpoint, work / "rope")
    command = [sys.executable, "-m", "kc_otel", "locate", "run", str(CONTRACT), "--train", str(checkpoint)]
    command += ["--infer", str(faulty), "--sequences", str(sequences(study, checkpoint, work / "sequences.jsonl"))]
    began = time.monotonic()
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, check=False)  # noqa: S603 - our own command
    if done.returncode not in {0, 1}:
        raise RuntimeError(f"locate ended with {done.returncode}; its messages are above")
    found = json.loads(done.stdout)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "culprit": found["culprit"],
        "shares": found["shares"],
        "settings": found["settings"],
        "sequences": found["sequences"],
        "tokens": found["tokens"],
        "seconds": time.monotonic() - began,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "largest_memory": used.ru_maxrss * 1024,
    }


def other_base(checkpoint: Path, into: Path) -> Path:
    """The checkpoint with the angles of another model in its configuration."""
    into.mkdir()
    for file in checkpoint.iterdir():
        (into / file.name).symlink_to(file.resolve())
    config = json.loads((checkpoint / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = _OTHER_BASE
    (into / "config.json").unlink()
    (into / "config.json").write_text(json.dumps(config))
    return into


def sequences(study: Path, checkpoint: Path, into: Path) -> Path:
    """Prompts of different slices with the beginning of an answer that vLLM gave, as JSON lines."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    measured = read(study, "vllm-bf16")
    if measured is None:
        raise RuntimeError(f"{study}: the pair vllm-bf16 is not measured yet, and its answers are what is run")
    asked, lines = prompts(), []
    for number in sorted(set(measured.prompt.tolist())):
        if asked[number].slice == "long" or len(lines) == SEQUENCES:  # a long prompt costs as much as ten others
            continue
        row = int((measured.prompt == number).argmax())
        start, length = measured.starts[row], min(measured.length[row], TOKENS)
        ids = {"prompt_ids": asked[number].ids(tokenizer), "token_ids": measured.tokens[start:][:length].tolist()}
        lines.append(json.dumps(ids))
    into.write_text("\n".join(lines) + "\n")
    return into
