"""vLLM's second model runner on a CPU, for what only it gives: sampling masks and routes of experts.

It takes Triton, whose kernels Triton's own interpreter runs where there is no GPU; the one kernel that it cannot run,
top-k with top-p, is replaced by vLLM's own form of it in PyTorch. Triton lies apart (Makefile), because vLLM and
transformers would take it for a GPU's; so this belongs into a process of its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

TRITON = Path(sys.prefix, "triton")


def start() -> None:
    """Make the second model runner the one that engines of this process get; before vLLM is imported."""
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_CI_ENV": "1",
    }
    sys.path.append(str(TRITON))
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
