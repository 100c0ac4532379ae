"""A checkpoint as GGUF, served by llama.cpp: kernels of C++ with blocks of 32 weights in 8 or 4 bits.

llama.cpp's server gives the log-probability of each sampled token from all of its logits, before any sampler, at
`/completion` with `n_probs`. With temperature 1 and every other sampler off, that is the distribution it drew from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

FORMATS = ("F16", "Q8_0", "Q4_0")
_NEUTRAL = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "samplers": ["temperature"],
    "repeat_penalty": 1.0, "cache_prompt": False,
}  # fmt: skip


def gguf_file(model: Any, tokenizer: Any, format: str, into: Path) -> Path:
    """A Qwen3 checkpoint in GGUF, its matrices in F16, Q8_0 or Q4_0; returns `into`.

    llama.cpp quantises activations to Q8_0 as it runs, for matrices in Q8_0 and Q4_0 alike.
    """
    import gguf  # noqa: PLC0415 - only who converts needs it

    config, writer = model.config, gguf.GGUFWriter(into, "qwen3")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{format}"])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokens(writer, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    wanted = gguf.GGMLQuantizationType[format]
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        as_gguf = names.get_name(name, try_suffixes=(".weight",))
        if values.ndim == 1:  # norms stay as they are, as in llama.cpp's own conversion
            writer.add_tensor(as_gguf, values)
        else:
            writer.add_tensor(as_gguf, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return into


def _add_tokens(writer: Any, tokenizer: Any, size: int) -> None:
    import gguf  # noqa: PLC0415

    state = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    ids = {number: token for token, number in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_ids)
    kind = gguf.TokenType
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([ids.get(number, f"[unused{number}]") for number in range(size)])
    writer.add_token_types(
        [kind.CONTROL if n in special else kind.NORMAL if n in ids else kind.UNUSED for n in range(size)]
    )
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in state["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)


@contextmanager
def serving(file: Path) -> Iterator[str]:
    """The address of llama.cpp's server, in this process, until the block ends.

    Args:
        file: The model.
    """
    from xllamacpp import CommonParams, Server  # noqa: PLC0415 - llama.cpp itself, only for who serves

    params = CommonParams()
    params.model.path, params.port = str(file), 0
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads, params.verbosity = 2048, 4, 1, -1
    server = Server(params)
    try:
        yield server.listening_address
    finally:
        del server


def complete(address: str, prompts: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Completions of prompts, at temperature 1 and from all tokens but the one that ends a text.

    Args:
        address: Of the server.
        prompts: Token ids [sequences, prompt tokens].
        tokens: How many each.

    Returns:
        Token ids and log-probabilities in nats, [sequences, tokens] each.

    Raises:
        RuntimeError: If an answer has fewer tokens.
    """
    ids, logprobs = [], []
    with httpx.Client(base_url=address, timeout=120.0) as client:
        for row, prompt in enumerate(prompts.tolist()):
            body = {"n_predict": tokens, "n_probs": 1, "seed": row, "return_tokens": True, "ignore_eos": True}
            answer = client.post("/completion", json=_NEUTRAL | body | {"prompt": prompt}).raise_for_status().json()
            if (count := len(answer["tokens"])) != tokens:
                raise RuntimeError(f"prompt {row}: {count} tokens of {tokens}")
            ids.append(answer["tokens"])
            said = answer["completion_probabilities"]
            logprobs.append([])
            for at, token in enumerate(answer["tokens"]):
                if said and said[0]["id"] == token:
                    logprobs[-1].append(said.pop(0)["logprob"])
                else:
                    logprobs[-1].append(_logprob(client, prompt + answer["tokens"][:at], token))
    return np.array(ids), np.array(logprobs)


def _logprob(client: httpx.Client, before: list[int], token: int) -> float:
    """Of a token that ends within a character: llama.cpp leaves these out of `completion_probabilities`.

    It tells all log-probabilities beside a token that it samples, if that one does end a character; so it is asked
    again until one does.
    """
    for seed in range(100):
        body = {"n_predict": 1, "n_probs": 1 << 20, "seed": seed, "prompt": before}
        said = (
            client.post("/completion", json=_NEUTRAL | body).raise_for_status().json().get("completion_probabilities")
        )
        if said:
            return next(float(top["logprob"]) for top in said[0]["top_logprobs"] if top["id"] == token)
    raise RuntimeError(f"llama.cpp told no log-probability of token {token}")


def sampled(
    model: Any, checkpoint: Path, begun: np.ndarray, tokens: int, folder: Path
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Number formats, and the tokens that llama.cpp samples in each with their log-probabilities, [S, tokens] each."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - as the model's

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for format in FORMATS:
        file = gguf_file(model, tokenizer, format, folder / f"{format}.gguf")
        with serving(file) as address:
            yield format, *complete(address, begun, tokens)
