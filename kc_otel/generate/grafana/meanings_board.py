"""The dashboard of what clauses mean: text only, one panel per clause, for everything else to link to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.explain import explain
from kc_otel.generate.files import GeneratedFile
from kc_otel.generate.grafana.boards import board, board_file
from kc_otel.generate.grafana.panels import text_panel
from kc_otel.generate.grafana.sdk import dashboard
from kc_otel.generate.links import MEANING_UID, panel_id
from kc_otel.generate.meaning import clause_meaning, contract_meaning

__all__ = ["meanings_file"]

_ROW_IDS: Final = 100
_GUIDE: Final = """\
A **kernel contract** says how far a training kernel (P) and an inference kernel (Q) of the same policy may differ. A
*clause* limits one statistic of one metric on every *slice* of the traffic. The evaluator keeps a confidence interval
for it: `PASS` when all of the interval is within the limit, `FAIL` when all of it is beyond, `INCONCLUSIVE` while the
limit lies inside, `NO_DATA` when the kernels are silent. w = P(y)/Q(y) is the importance ratio of a sampled token y,
and l = log w. Every row below is a contract, every panel a clause.
"""


def meanings_file(contracts: Iterable[Contract]) -> GeneratedFile:
    """The dashboard of all contracts."""
    made = board(
        MEANING_UID,
        "What each clause promises, what follows from it, and what happens when it breaks.",
        (),
        changes=False,
    )
    made = made.with_panel(text_panel(1, "How to read a contract", _GUIDE, 5))
    for index, contract in enumerate(contracts):
        made = made.with_row(_row(index, contract))
    return board_file("meaning", made)


def _row(index: int, contract: Contract) -> Any:
    about = f": {contract.metadata.description}" if contract.metadata.description else ""
    row = dashboard.Row(f"{contract.name}{about}").id(_ROW_IDS + index)
    explanation = explain(contract)
    for place, clause in enumerate(contract.clauses, start=1):
        text = clause_meaning(contract, clause, explanation)
        alone = place % 2 and place == len(contract.clauses)
        title = f"{contract.name}: {clause.id}"
        row = row.with_panel(text_panel(panel_id(contract.name, clause.id), title, text, 14, 24 if alone else 12))
    whole = panel_id(contract.name, "contract as a whole")
    return row.with_panel(text_panel(whole, f"{contract.name} as a whole", contract_meaning(explanation), 24))
