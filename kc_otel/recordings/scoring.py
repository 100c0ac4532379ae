"""Teacher-forced log-probabilities: a training kernel's scores of tokens that another kernel sampled.

One forward over prompt and tokens, as in a training step, and none of its logits in float32 at once: a batch is cut
into forwards of bounded size, and the log-softmax runs over blocks of positions. Sampling processing is applied to the
training kernel's logits in the order in which vLLM applies it to its own, so that both sides describe the distribution
that the tokens were drawn from.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.contract.slices import Scalar
from kc_otel.recordings.request import SUPPORTED, KeptTokens, effective

if TYPE_CHECKING:
    import torch

_LOGITS_PER_BLOCK: Final = 1 << 22
"""Logits that are worked on at a time: 16 MiB in float32."""


class UnscorableError(ValueError):
    """A kernel does not take this request, such as one that fills its context, and takes others."""


class UnavailableError(Exception):
    """A kernel does not answer: it may be asked again later."""


class Scorer(Protocol):
    """A kernel as a function: log-probabilities of given tokens after given prompts."""

    def __call__(
        self,
        prompt_ids: Sequence[Any],
        token_ids: Sequence[Any],
        processing: Mapping[str, Scalar] | None = None,
        kept: Sequence[KeptTokens] | None = None,
    ) -> Sequence[Any]:
        """Return for each sequence the log-probabilities of its tokens, nats, [tokens], NumPy or torch.

        `kept` are, per sequence, the tokens that the inference kernel's truncation kept, in the place of top_p, top_k
        and min_p; the result is then [2, tokens]: before truncation, and the log of the mass of those tokens. Functions
        without this argument cut where the training kernel would: a token beyond that has -inf.
        """


def hf_scorer(model: torch.nn.Module, *, autocast: torch.dtype | None = None, max_logits: int = 1 << 28) -> Scorer:
    """A Hugging Face causal language model as a scorer, in the number format that its parameters have.

    Sequences are padded on the right and masked; sort by length before calling. `autocast` is the region's number
    format, as in training. A forward has at most `max_logits`, 512 MiB in bfloat16; a single sequence is never cut.
    """
    with extra("torch", "a scorer"):
        import torch  # noqa: PLC0415 - the core does without torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: {type(model).__name__} is not a torch.nn.Module")
    if max_logits < 1:
        raise ValueError(f"max_logits: {max_logits!r} leaves no room for a forward; leave it out for the default")
    keeps = "logits_to_keep" in inspect.signature(_innermost(model).forward).parameters

    def score(
        prompt_ids: Sequence[Any],
        token_ids: Sequence[Any],
        processing: Mapping[str, Scalar] | None = None,
        kept: Sequence[KeptTokens] | None = None,
    ) -> list[NDArray[np.float32]]:
        wanted = _checked(processing)
        prompts, tokens = _sequences(prompt_ids, token_ids)
        if kept is not None:
            wanted = {name: value for name, value in wanted.items() if name == "temperature"}
        device = next(model.parameters()).device
        found = []
        with (
            _evaluating(model),
            torch.no_grad(),
            torch.autocast(device.type, dtype=autocast, enabled=autocast is not None),
        ):
            for rows in _forwards(prompts, tokens, max_logits // _vocabulary(model), keeps=keeps):
                masks = None if kept is None else [kept[i] for i in rows]
                found += _forward(
                    model, [prompts[i] for i in rows], [tokens[i] for i in rows], wanted, masks, keeps=keeps
                )
        return found

    return score


def sampled_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, processing: Mapping[str, Scalar] | None = None
) -> torch.Tensor:
    """Log-probabilities [positions] of tokens [positions] under logits [positions, vocabulary], float32, nats.

    Temperature first, then min-p, top-k and top-p; a token that they leave out has -inf. Ties with the k-th logit stay.
    """
    import torch  # noqa: PLC0415 - the core does without torch

    positions, vocabulary = logits.shape
    dtype = torch.promote_types(logits.dtype, torch.float32)
    out = torch.empty(positions, dtype=dtype, device=logits.device)
    step = max(_LOGITS_PER_BLOCK // vocabulary, 1)
    for start in range(0, positions, step):
        block = processed(logits[start : start + step].to(dtype), processing)
        chosen = block.gather(-1, token_ids[start : start + step, None].to(block.device)).squeeze(-1)
        out[start : start + step] = chosen - block.logsumexp(-1)
    return out


def processed(logits: torch.Tensor, processing: Mapping[str, Scalar] | None) -> torch.Tensor:
    """Logits [positions, vocabulary] after processing, -inf where nothing is sampled; may return its argument."""
    wanted, lowest = _checked(processing), float("-inf")
    if (temperature := wanted.get("temperature", 1.0)) != 1.0:
        logits = logits / temperature
    if "min_p" in wanted:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < wanted["min_p"] * probabilities.amax(-1, keepdim=True), lowest)
    if (k := int(wanted.get("top_k", logits.shape[-1]))) < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(k, dim=-1).values[:, -1:], lowest)
    if "top_p" in wanted:
        ascending, order = logits.sort(dim=-1)
        left_out = ascending.softmax(-1).cumsum(-1) <= 1.0 - wanted["top_p"]
        left_out[:, -1] = False
        logits = logits.masked_fill(left_out.gather(-1, order.argsort(-1)), lowest)
    return logits


def kept_mass(logits: torch.Tensor, kept: KeptTokens, processing: Mapping[str, Scalar] | None = None) -> torch.Tensor:
    """Log of the mass, nats, float64 [positions], that logits give to the tokens that a truncation kept."""
    import torch  # noqa: PLC0415 - the core does without torch

    positions, vocabulary = logits.shape
    if kept.counts.size != positions:
        raise ValueError(f"kept: has {kept.counts.size} sets of tokens for {positions} positions; give one for each")
    at = torch.from_numpy(np.repeat(np.arange(positions), kept.counts)).to(logits.device)
    ids = torch.from_numpy(kept.ids).to(logits.device)
    ends = np.cumsum(kept.counts)
    mass = torch.zeros(positions, dtype=torch.float64, device=logits.device)
    dtype, step = torch.promote_types(logits.dtype, torch.float32), max(_LOGITS_PER_BLOCK // vocabulary, 1)
    for start in range(0, positions, step):
        block = processed(logits[start : start + step].to(dtype), processing)
        part = slice(int(ends[start] - kept.counts[start]), int(ends[min(start + step, positions) - 1]))
        share = (block[at[part] - start, ids[part]] - block.logsumexp(-1)[at[part] - start]).double().exp()
        mass.index_add_(0, at[part], share)
    return mass.log()


def _checked(processing: Mapping[str, Scalar] | None) -> dict[str, float]:
    """Return the processing parameters that have an effect, as numbers."""
    given = effective(processing or {})
    for name, value in given.items():
        if name not in SUPPORTED:
            raise ValueError(f"processing: {name}={value!r} cannot be applied here; only {', '.join(SUPPORTED)} can")
        if isinstance(value, str | bool):
            raise ValueError(f"processing: {name}={value!r} is not a number")  # noqa: TRY004 - a wrong value in a map
    if not float(given.get("temperature", 1.0)) > 0.0:
        raise ValueError("processing: temperature=0 samples nothing, its log-probabilities say nothing; sample above 0")
    return {name: float(value) for name, value in given.items()}


def _sequences(prompt_ids: Sequence[Any], token_ids: Sequence[Any]) -> tuple[list[NDArray[np.int64]], ...]:
    if len(prompt_ids) != len(token_ids):
        raise ValueError(f"token_ids: {len(token_ids)} sequences for {len(prompt_ids)} prompts; give one for each")
    prompts, tokens = ([np.asarray(ids, dtype=np.int64) for ids in side] for side in (prompt_ids, token_ids))
    for row, prompt in enumerate(prompts):
        if not prompt.size:
            raise ValueError(f"prompt_ids[{row}]: empty, so that nothing predicts the first token; give at least one")
    return prompts, tokens


def _forwards(
    prompts: Sequence[NDArray[np.int64]], tokens: Sequence[NDArray[np.int64]], most: int, *, keeps: bool
) -> Iterator[range]:
    """Consecutive rows whose positions with logits, padding included, are at most `most`; one row at least."""
    start = 0
    while start < len(prompts):
        first, last, end = prompts[start].size if keeps else 1, 0, start
        while end < len(prompts):
            first, last = min(first, prompts[end].size), max(last, prompts[end].size + tokens[end].size)
            if end > start and (end - start + 1) * (last - first + 1) > most:
                break
            end += 1
        yield range(start, end)
        start = end


def _forward(
    model: torch.nn.Module,
    prompts: Sequence[NDArray[np.int64]],
    tokens: Sequence[NDArray[np.int64]],
    processing: Mapping[str, float],
    masks: Sequence[KeptTokens] | None,
    *,
    keeps: bool,
) -> list[NDArray[np.float32]]:
    import torch  # noqa: PLC0415 - the core does without torch

    device = next(model.parameters()).device
    width = max(p.size + t.size for p, t in zip(prompts, tokens, strict=True))
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, tokens, strict=True)):
        end = prompt.size + completion.size
        ids[row, :end] = np.concatenate((prompt, completion))
        mask[row, :end] = 1
    first = min(prompt.size for prompt in prompts) - 1 if keeps else 0
    kept = {"logits_to_keep": width - first} if keeps else {}
    input_ids = torch.from_numpy(ids).to(device)
    attention = torch.from_numpy(mask).to(device)
    logits = model(input_ids=input_ids, attention_mask=attention, use_cache=False, **kept).logits
    found = []
    for row, (prompt, completion) in enumerate(zip(prompts, tokens, strict=True)):
        start, end = prompt.size - 1, prompt.size - 1 + completion.size
        here, sampled = logits[row, start - first : end - first], input_ids[row, start + 1 : end + 1]
        chosen = sampled_logprobs(here, sampled, processing)
        if masks is not None:
            chosen = torch.stack((chosen, kept_mass(here, masks[row], processing)))
        found.append(chosen.float().cpu().numpy())
    return found


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """`eval` mode, and back to what each module was in, which need not be the same for all of them."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _innermost(model: Any) -> Any:
    """The model inside of an adapter, whose `forward` names its arguments."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _vocabulary(model: Any) -> int:
    config = getattr(_innermost(model), "config", None)
    if config is None:
        return 1
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(text.vocab_size)
