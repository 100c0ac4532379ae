"""The inference kernel: vLLM in this process, or the same weights in bfloat16 in Hugging Face where vLLM is missing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

TOKENS = 32

Sampled = tuple[list[list[int]], list[list[float]]]


class VllmSampler:
    """vLLM on a checkpoint's folder; new weights are written there and loaded again."""

    name = "vllm"

    def __init__(self, folder: Path, **options: Any) -> None:
        from vllm import LLM  # noqa: PLC0415

        self.folder = folder
        self.llm = LLM(
            str(folder),
            dtype="bfloat16",
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=256,
            logprobs_mode="processed_logprobs",
            # Cached prefixes are from the weights before.
            enable_prefix_caching=False,
            use_tqdm_on_load=False,
            **options,
        )

    def load(self, model: Any) -> None:
        """Sample with these weights from now on."""
        model.save_pretrained(self.folder)
        self.llm.collective_rpc("reload_weights")

    def sample(self, prompts: list[list[int]]) -> Sampled:
        """Tokens and their log-probabilities."""
        from vllm import SamplingParams  # noqa: PLC0415

        asked = SamplingParams(max_tokens=TOKENS, temperature=1.0, logprobs=0)
        answers = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        outputs = [answer.outputs[0] for answer in answers]
        logprobs = [[at[token].logprob for at, token in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]
        return [list(output.token_ids) for output in outputs], logprobs


class HuggingFaceSampler:
    """`generate` with a KV cache, in bfloat16."""

    name = "transformers"

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def load(self, model: Any) -> None:
        """Sample with these weights from now on."""
        self.model.load_state_dict(model.state_dict())

    def sample(self, prompts: list[list[int]]) -> Sampled:
        """Tokens and their log-probabilities."""
        width, end = max(map(len, prompts)), self.model.config.eos_token_id
        padding = [[end] * (width - len(ids)) for ids in prompts]
        output = self.model.generate(
            torch.tensor([[*left, *ids] for left, ids in zip(padding, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * len(left) + [1] * (width - len(left)) for left in padding]),
            max_new_tokens=TOKENS,
            do_sample=True,
            top_k=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        chosen = output.sequences[:, width:]
        scores = torch.stack(output.logits, 1).float().log_softmax(-1).gather(-1, chosen[..., None]).squeeze(-1)
        lengths = [row.index(end) + 1 if end in row else len(row) for row in chosen.tolist()]
        tokens, logprobs = chosen.tolist(), scores.tolist()
        return tuple([row[:n] for row, n in zip(rows, lengths, strict=True)] for rows in (tokens, logprobs))


def sampler(folder: Path) -> VllmSampler | HuggingFaceSampler:
    """What there is."""
    return VllmSampler(folder) if find_spec("vllm") else HuggingFaceSampler(folder)
