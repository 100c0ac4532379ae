"""The training loop of your own, in plain torch."""

import pytest
import torch

from examples.plain_torch.__main__ import SEQUENCES, STEPS, TOKENS, Policy, contexts, int4, sample, train
from kc_otel.record.measure.checks import check


def test_a_token_that_is_repeated_has_another_log_probability_each_time():
    """Equal numbers in a row would be taken for placeholders, and their sequences would not be measured."""
    torch.manual_seed(0)
    logits = Policy()(contexts(torch.tensor([1]), torch.zeros(1, TOKENS + 1, dtype=torch.long)).flatten(0, 1))
    assert len({round(value, 5) for value in logits[:, 0].tolist()}) == TOKENS + 2
    assert sample(Policy(), torch.tensor([0, 1]))[1].shape == (2, TOKENS)


@pytest.mark.slow
def test_every_sequence_of_the_sampler_in_four_bits_is_measured():
    """A policy of a few states is no multiple of itself, and once it is sure of all tokens its numbers are no means."""
    codes = []

    class Recorder:
        def compare(self, logprobs, sampled, **_):
            codes.extend(check(logprobs.detach(), sampled).tolist())

    torch.manual_seed(0)
    list(train(Policy(), int4, Recorder()))
    assert codes == [0] * (SEQUENCES * STEPS)
