"""A language model that fits a CPU, made on the spot: tokenizer, architecture and weights, nothing downloaded.

A Qwen3 with 3 million parameters and byte-level BPE, trained for some seconds on the text that Python itself carries.
That is enough for peaked logits that differ between code, prose and tables, and it is a directory that Hugging Face
and vLLM load like any other checkpoint. The same call on the same interpreter makes the same model.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.demo.corpus import SLICES, load_corpus

VOCABULARY = 512
CONTEXT = 1024
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"

_END = "<|end|>"
_TOKENIZER_CHARACTERS = 300_000
_TRAINED_CHARACTERS = 400_000
_STEPS, _BATCH, _LENGTH, _RATE = 150, 8, 128, 6e-3
_WIDTH, _LAYERS = 256, 4
_RECIPE = (
    VOCABULARY,
    CONTEXT,
    CHAT_TEMPLATE,
    _TOKENIZER_CHARACTERS,
    _TRAINED_CHARACTERS,
    _STEPS,
    _BATCH,
    _LENGTH,
    _RATE,
    _WIDTH,
    _LAYERS,
)


def tiny_model(folder: Path) -> Path:
    """The checkpoint's directory inside `folder`; made and trained if it is not there yet (about 20 s)."""
    digest = hashlib.sha256(f"{_RECIPE} {sys.version}".encode()).hexdigest()
    done = folder / f"tiny-{digest[:12]}"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder, prefix=".making-"))
        try:
            _make(work)
            work.replace(done)  # whoever else made it meanwhile made the same
        except OSError:
            if not done.exists():
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return done


def prompts(slice: str, count: int, *, characters: int = 120) -> list[str]:
    """Beginnings for the model to go on from, out of text of that slice that it was not trained on.

    Raises:
        ValueError: If there is no such slice, or not as much text.
    """
    if slice not in SLICES:
        raise ValueError(f"slice: {slice!r} is none of {', '.join(SLICES)}")
    text = bytes(load_corpus()[slice].held_out.byte().numpy()).decode("utf-8", "ignore")
    if count * characters > len(text):
        raise ValueError(f"count: {count} prompts of {characters} characters are more than the {len(text)} there are")
    stride = len(text) // count
    return [text[i * stride : i * stride + characters] for i in range(count)]


def _make(into: Path) -> None:
    import torch  # noqa: PLC0415 - a model that is there already needs none of this
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    texts = {name: bytes(text.train.byte().numpy()).decode("utf-8", "ignore") for name, text in load_corpus().items()}
    tokenizer = _tokenizer(text[:_TOKENIZER_CHARACTERS] for text in texts.values())
    tokenizer.save_pretrained(into)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=_WIDTH,
                intermediate_size=2 * _WIDTH,
                num_hidden_layers=_LAYERS,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                max_position_embeddings=CONTEXT,
                tie_word_embeddings=False,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.eos_token_id,
            )
        )
        _train(model, [tokenizer(text[:_TRAINED_CHARACTERS])["input_ids"] for text in texts.values()])
    model.save_pretrained(into)


def _tokenizer(texts: Iterator[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=_END,
        pad_token=_END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _train(model: Any, slices: list[list[int]]) -> None:
    import torch  # noqa: PLC0415

    tokens = [torch.tensor(ids) for ids in slices]
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=_STEPS)
    model.train()
    for _ in range(_STEPS):
        rows = []
        for i in range(_BATCH):
            ids = tokens[i % len(tokens)]
            start = int(torch.randint(len(ids) - _LENGTH, ()))
            rows.append(ids[start : start + _LENGTH])
        batch = torch.stack(rows)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
