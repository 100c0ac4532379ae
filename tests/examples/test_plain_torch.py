"""The training loop of your own, in plain torch."""

import torch

from examples.plain_torch.__main__ import TOKENS, Policy, contexts, sample


def test_a_token_that_is_repeated_has_another_log_probability_each_time():
    """Equal numbers in a row would be taken for placeholders, and their sequences would not be measured."""
    torch.manual_seed(0)
    logits = Policy()(contexts(torch.tensor([1]), torch.zeros(1, TOKENS + 1, dtype=torch.long)).flatten(0, 1))
    assert len({round(value, 5) for value in logits[:, 0].tolist()}) == TOKENS + 2
    assert sample(Policy(), torch.tensor([0, 1]))[1].shape == (2, TOKENS)
