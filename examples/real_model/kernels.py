"""The study's kernels: each samples answers at temperature 1 and tells all log-probabilities that it drew from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

VOCABULARY: Final = 49_152
CONTEXT: Final = 2_048


@dataclass(frozen=True)
class KernelPair:
    """A training kernel, Hugging Face on the checkpoint, beside an inference kernel.

    Attributes:
        title: As tables and pictures have it.
        engine: What samples: huggingface, vllm or llama.cpp.
        train: Number format of the training kernel.
        dtype: Number format in which the inference kernel computes.
        weights: How its weights are held: as they are, int8, gptq, awq, q4_1.
        cache: How its keys and values are held.
    """

    title: str
    engine: str
    dtype: str
    train: str = "float32"
    weights: str = "as they are"
    cache: str = "auto"


PAIRS: Final = {
    "llama-q4_1": KernelPair("llama.cpp on Q4_1", "llama.cpp", "q8_1", weights="q4_1", cache="float16"),
    "vllm-bf16": KernelPair("vLLM bf16", "vllm", "bfloat16"),
    "hf-bf16": KernelPair("Hugging Face bf16", "huggingface", "bfloat16"),
    "vllm-w8a8": KernelPair("vLLM W8A8", "vllm", "bfloat16", weights="int8"),
    "vllm-fp8-kv": KernelPair("vLLM fp8 KV cache", "vllm", "bfloat16", cache="fp8"),
    "vllm-awq": KernelPair("vLLM AWQ 4-bit", "vllm", "bfloat16", weights="awq"),
    "vllm-gptq": KernelPair("vLLM GPTQ 4-bit", "vllm", "bfloat16", weights="gptq"),
    "vllm-fp32": KernelPair("vLLM fp32", "vllm", "float32"),
    "both-bf16": KernelPair("vLLM and trainer bf16", "vllm", "bfloat16", train="bfloat16"),
}


def same_inference(name: str, among: Iterable[str]) -> list[str]:
    """Those of these pairs that have this one's inference kernel: one sampling serves them all."""
    kernel = replace(PAIRS[name], title="", train="")
    return [other for other in among if replace(PAIRS[other], title="", train="") == kernel]


def huggingface(checkpoint: Path, dtype: str, *, rounded: bool = False) -> Any:
    """The checkpoint in Hugging Face, with keys and values rounded to e4m3 in its attention if asked."""
    import torch  # noqa: PLC0415 - names of kernels are known without it
    from transformers import AttentionInterface, AutoModelForCausalLM  # noqa: PLC0415
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415

    def in_e4m3(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        key, value = (side.to(torch.float8_e4m3fn).to(query.dtype) for side in (key, value))
        return sdpa_attention_forward(module, query, key, value, *rest, **options)

    AttentionInterface.register("in_e4m3", in_e4m3)
    attention = "in_e4m3" if rounded else "sdpa"
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation=attention)
    return loaded.eval()


class HuggingFace:
    """The checkpoint through `transformers`, with its KV cache: samples, and scores what others sampled."""

    def __init__(self, model: Any, sequences: int) -> None:
        self._model, self._sequences, self._cache = model, sequences, None

    def begin(self, prompt: list[int]) -> np.ndarray:
        """The logits [vocabulary] after a prompt that all sequences now have."""
        import torch  # noqa: PLC0415

        with torch.inference_mode():
            output = self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            self._cache = output.past_key_values
            self._cache.batch_repeat_interleave(self._sequences)
        return np.asarray(output.logits[0, -1].float())

    def next(self, tokens: Sequence[int], _position: int) -> np.ndarray:
        """The logits [sequences, vocabulary] after one more token of each sequence."""
        import torch  # noqa: PLC0415

        with torch.inference_mode():
            output = self._model(torch.tensor(tokens)[:, None], past_key_values=self._cache, use_cache=True)
        return np.asarray(output.logits[:, -1].float())

    def score(self, prompt: list[int], tokens: np.ndarray) -> np.ndarray:
        """The logits [sequences, tokens, vocabulary] that a training step computes for given answers."""
        import torch  # noqa: PLC0415

        first = np.repeat(self.begin(prompt)[None, None], len(tokens), 0)
        if tokens.shape[1] == 1:
            return first
        with torch.inference_mode():
            output = self._model(torch.from_numpy(tokens[:, :-1].astype(np.int64)), past_key_values=self._cache)
        return np.concatenate([first, output.logits.float().numpy()], 1)


Answer = tuple[np.ndarray, np.ndarray]
"""Token ids [sequences, tokens], and logits that they were drawn from [sequences, tokens, vocabulary]."""


def stepwise(kernel: Any, sequences: int, prompt: list[int], tokens: int, end: int, seed: int) -> Answer:
    """Sample answers to a prompt from a kernel that is asked for one token after the other."""
    chance = np.random.default_rng(seed)
    logits = np.repeat(kernel.begin(prompt)[None], sequences, 0)
    drawn, seen = [], []
    ended = np.zeros(sequences, bool)
    for at in range(tokens):
        seen.append(logits)
        chosen = (logits + chance.gumbel(size=logits.shape).astype(np.float32)).argmax(1)
        drawn.append(chosen)
        ended |= chosen == end
        if ended.all() or at == tokens - 1:
            break
        logits = kernel.next(chosen.tolist(), len(prompt) + at)
    return np.stack(drawn, 1), np.stack(seen, 1)


def sampled(
    pair: KernelPair, checkpoint: Path, file: Path, folder: Path, asked: Sequence[tuple[list[int], int]], *,
    rollouts: int, end: int, seeds: Sequence[int], threads: int,
) -> Iterator[tuple[int, Answer]]:  # fmt: skip
    """Answers to prompts, given as token ids and most tokens, with the prompt's place among these."""
    if pair.engine == "vllm":
        yield from _from_vllm(pair, held(pair.weights, checkpoint, folder), asked, rollouts=rollouts, seeds=seeds)
        return
    if pair.engine == "llama.cpp":
        from examples.real_model.llama_cpp import LlamaCpp  # noqa: PLC0415

        kernel: Any = LlamaCpp(file, vocabulary=VOCABULARY, sequences=rollouts, context=CONTEXT, threads=threads)
    else:
        kernel = HuggingFace(huggingface(checkpoint, pair.dtype, rounded=pair.cache == "fp8"), rollouts)
    for i, (prompt, tokens) in enumerate(asked):
        yield i, stepwise(kernel, rollouts, prompt, tokens, end, seeds[i])


def held(weights: str, checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with its weights in fewer bits, written where it is not yet."""
    if weights not in {"int8", "gptq", "awq"}:
        return checkpoint
    if not (into := folder / weights).exists():
        if weights == "int8":
            from examples.quantised import in_int8  # noqa: PLC0415

            return in_int8(checkpoint, into)
        from examples.real_model.four_bits import in_four_bits  # noqa: PLC0415

        return in_four_bits(checkpoint, into, weights)
    return into


def _from_vllm(
    pair: KernelPair, checkpoint: Path, asked: Sequence[tuple[list[int], int]], *, rollouts: int, seeds: Sequence[int]
) -> Iterator[tuple[int, Answer]]:
    from vllm import LLM, SamplingParams  # noqa: PLC0415
    from vllm.v1.sample.sampler import Sampler  # noqa: PLC0415

    computed: list[Any] = []
    compute = Sampler.compute_logprobs

    def kept(logits: Any) -> Any:
        """What every row's next token is sampled from, [rows, vocabulary]."""
        computed.append(compute(logits).clone())
        return computed[-1]

    Sampler.compute_logprobs = staticmethod(kept)
    engine = LLM(
        str(checkpoint), dtype=pair.dtype, kv_cache_dtype=pair.cache, max_model_len=CONTEXT, enforce_eager=True,
        max_num_batched_tokens=1 << 15, max_num_seqs=64, kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False,
        use_tqdm_on_load=False,
    )  # fmt: skip
    try:
        for batch in batches([tokens for _, tokens in asked]):
            computed.clear()
            tokens = asked[batch[0]][1]
            # All go on to the last token, so that rows stay where they are; what follows an end is left out later.
            terms = [
                SamplingParams(seed=seeds[i] * rollouts + row, max_tokens=tokens, ignore_eos=True, logprobs=0,
                               detokenize=False)
                for i in batch for row in range(rollouts)
            ]  # fmt: skip
            given = [{"prompt_token_ids": asked[i][0]} for i in batch for _ in range(rollouts)]
            outputs = engine.generate(given, terms, use_tqdm=False)
            if len(computed) != tokens:
                raise RuntimeError(f"vLLM took {len(computed)} steps for {tokens} tokens: not all ran in one batch")
            drawn = np.array([output.outputs[0].token_ids for output in outputs])
            for place, i in enumerate(batch):
                rows = slice(place * rollouts, (place + 1) * rollouts)
                yield i, (drawn[rows], np.stack([np.asarray(step[rows]) for step in computed], 1))
    finally:
        Sampler.compute_logprobs = staticmethod(compute)
        engine.llm_engine.engine_core.shutdown()


def batches(tokens: Sequence[int], most: int = 512) -> Iterator[list[int]]:
    """Numbers of prompts that run together: with the same most tokens, and of so many in all, or logits fill memory."""
    waiting: dict[int, list[int]] = {}
    for i, count in enumerate(tokens):
        waiting.setdefault(count, []).append(i)
        if (len(waiting[count]) + 1) * count > most:
            yield waiting.pop(count)
    yield from waiting.values()
