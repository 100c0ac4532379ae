"""The bias of the policy gradient that a pair's rollouts would give, beside its bounds.

Over the first 32 tokens of each answer that the study measured: the score of the last six layers, 21 million numbers,
as a sketch with the same inner products on average. The advantage is the reward less its prompt's mean; and, to try
what the paper would be refuted by (ratios that are bounded while the bias is not), the one that makes the most of every
ratio: the sign of 1 - W.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import numpy as np

from examples.real_model.figures import Measured, by_prompt, read
from examples.real_model.kernels import huggingface
from examples.real_model.measure import model_here
from examples.real_model.prompts import prompts
from examples.rl_bias.gradient_bounds import gradient_bias_from_chi2, largest_second_moment
from kc_otel.stats import estimated_gradient_bias

PAIRS: Final = ("vllm-bf16", "vllm-fp8-kv", "vllm-w8a8")
HORIZON: Final = 32
SKETCH: Final = 4_096
PROMPTS: Final = 12
TRAINED_LAYERS: Final = 6


def gradient(pair: str, folder: Path) -> dict[str, Any]:
    """Measure a pair's bias.

    Raises:
        RuntimeError: If the pair is not measured yet.
    """
    measured = read(folder, pair)
    if measured is None:
        raise RuntimeError(f"{folder}: the pair {pair} is not measured yet, and its answers are what is differentiated")
    measured = measured.only(measured.prompt < PROMPTS)
    return beside_bounds(measured, *scores(measured))


def scores(measured: Measured) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of log P of the first tokens of each sequence, as sketches [S, SKETCH], and its norm [S]."""
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    checkpoint = model_here()[1]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = huggingface(checkpoint, "float32")
    last = model.config.num_hidden_layers - TRAINED_LAYERS
    for name, parameter in model.named_parameters():
        place = name.split(".")[2]
        parameter.requires_grad_(place.isdigit() and int(place) >= last)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size = sum(parameter.numel() for parameter in trained)
    chance = torch.Generator().manual_seed(0)
    place = torch.randint(SKETCH, (size,), generator=chance)
    sign = torch.randint(2, (size,), generator=chance).float() * 2 - 1
    ids = [prompt.ids(tokenizer) for prompt in prompts()]
    sketches, norms = [], []
    for row, start in enumerate(measured.starts):
        answer = measured.tokens[start : start + min(measured.length[row], HORIZON)].tolist()
        prompt = ids[measured.prompt[row]]
        logits = model(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1]
        logits.log_softmax(-1)[range(len(answer)), answer].sum().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in trained])
        model.zero_grad(set_to_none=True)
        sketches.append(torch.zeros(SKETCH).index_add_(0, place, gradient * sign).numpy())
        norms.append(float(gradient.norm()))
        if len(norms) % 8 == 0:
            print(f"gradient: {len(norms)} of {measured.prompt.size} answers", flush=True)
    return np.stack(sketches).astype(np.float64), np.array(norms)


def beside_bounds(measured: Measured, sketches: np.ndarray, norms: np.ndarray) -> dict[str, Any]:
    """The bias under both advantages, and every bound on it."""
    ratio = measured.train - measured.inference
    log_w = measured.sums(ratio, HORIZON)
    prompt = measured.prompt
    _, of = np.unique(prompt, return_inverse=True)
    group = measured.reward - by_prompt(measured.reward, prompt)[of]
    tv = float(by_prompt(np.maximum(-np.expm1(log_w), 0.0), prompt).mean())
    chi2 = float((np.expm1(log_w) ** 2).mean())
    largest = float(np.abs(ratio[measured.place < HORIZON]).max())
    found: dict[str, Any] = {
        "sequences": int(prompt.size), "prompts": int(of.max()) + 1, "horizon": HORIZON, "sequence_tv": tv,
        "sequence_chi2": chi2, "largest_log_ratio": largest, "score_norm": float(norms.max()),
    }  # fmt: skip
    for name, advantage in (("reward", group), ("adversarial", np.sign(-np.expm1(log_w)))):
        most = float(np.abs(advantage).max())
        if not most:
            continue
        bias = estimated_gradient_bias(log_w, advantage, sketches, prompts=prompt)
        scale = most * float(norms.max())
        found[name] = {
            "bias": bias.norm,
            "lower": bias.lower,
            "upper": bias.upper,
            "gradient": float(np.linalg.norm((advantage[:, None] * sketches).mean(0))),
            "by_chi2": gradient_bias_from_chi2(chi2, second_moment=largest_second_moment(advantage, sketches)),
            "by_tv": 2.0 * scale * tv,
            "by_largest_ratio": scale * math.expm1(HORIZON * largest),
        }
    return found
