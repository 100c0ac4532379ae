"""SmolLM2-135M, where a toy hides something: 30 layers, 49,152 tokens, a tied head, a tokenizer with merges."""

import numpy as np
import pytest

from examples.real_model import measure
from examples.real_model.__main__ import main as study
from examples.real_model.checkpoint import MissingModelError
from examples.real_model.figures import figures, read
from examples.real_model.kernels import VOCABULARY, HuggingFace, huggingface
from examples.real_model.llama_cpp import LlamaCpp
from examples.real_model.prompts import prompts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real_model():
    """llama.cpp's file, and the Hugging Face folder that is made of it."""
    try:
        return measure.model_here()
    except MissingModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(real_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_model[1])


def test_text_comes_back_from_the_tokenizer_and_digits_are_single(tokenizer):
    for prompt in prompts():
        assert tokenizer.decode(tokenizer(prompt.text)["input_ids"]) == prompt.text
    assert len(tokenizer("1965")["input_ids"]) == 4
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.eos_token_id]


def test_two_programs_read_one_set_of_weights(real_model, tokenizer):
    """Hugging Face on the folder and llama.cpp on the file name the capital of France, and are close on the rest."""
    file, folder = real_model
    prompt = tokenizer("The capital of France is")["input_ids"]
    llama = LlamaCpp(file, vocabulary=VOCABULARY, sequences=2, context=64, threads=1)
    reference = HuggingFace(huggingface(folder, "float32"), 2)
    logits = np.stack([llama.begin(prompt), reference.begin(prompt)])
    paris = tokenizer(" Paris")["input_ids"]
    assert logits.argmax(1).tolist() == 2 * paris
    after = np.stack([llama.next(2 * paris, len(prompt))[1], reference.next(2 * paris, len(prompt))[1]])
    for both in (logits, after):
        first, second = np.exp(both - np.logaddexp.reduce(both, 1, keepdims=True))
        assert 1e-4 < np.abs(first - second).sum() / 2 < 0.1


@pytest.mark.usefixtures("real_model")
def test_a_pair_is_measured_prompt_by_prompt_and_goes_on_where_it_was(tmp_path, capsys):
    arguments = ["--job", "llama-q4_1", "--folder", str(tmp_path), "--rollouts", "2", "--tokens", "8"]
    study([*arguments, "--prompts", "1"])
    first = measure.file_of(tmp_path, "llama-q4_1", 0)
    written = first.stat().st_mtime_ns
    study([*arguments, "--prompts", "2"])
    assert first.stat().st_mtime_ns == written
    assert "2 of 2 prompts, arithmetic" in capsys.readouterr().out
    found = figures(read(tmp_path, "llama-q4_1"))
    assert found["prompts"] == 2
    assert 1e-3 < found["slices"]["all"]["token_tv_exact"] < 0.2
