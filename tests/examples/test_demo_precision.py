"""The demo's int8 kernel passes its gate again with a few of its matrices in bf16, and the search finds them."""

import pytest
import torch

from examples.demo.corpus import load_corpus
from examples.demo.model import Config, Model
from examples.demo.precision import CONTRACT, Gate, components
from kc_otel.contract.load import load
from kc_otel.offline.remedy.precision import cheapest
from kc_otel.offline.remedy.precision_text import precision_sentence


@pytest.mark.slow
def test_the_search_finds_what_int8_lost_on_tables(demo_weights):
    """Kept in bf16, the MLPs' second products, whose scales have seen no tables, pass on requests that are new."""
    model = Model(Config())
    model.load_state_dict(torch.load(demo_weights, weights_only=True))
    wanted = [each for each in components(model) if each.name.endswith("down")]
    gate = Gate(load(CONTRACT), model.eval(), load_corpus(), rows=64)
    found = cheapest(wanted, gate, most=8)
    assert not found.plain.passes
    assert found.worst.cell.slice == "tables"
    assert found.found is not None
    assert found.verified.passes
    assert len(found.found.kept) > 1
    assert found.gives_back(found.found) > max(found.gives_back(each) for each in found.alone) > 0.0
    assert "gate passes on new requests" in precision_sentence("int8", found)
