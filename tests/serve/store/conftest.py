from tests.judge.conftest import contract, merged, now, sender
from tests.judge.escalation.conftest import connection, make_contract, make_verdict
from tests.offline.replay.conftest import entries, lines, traffic

__all__ = [
    "connection",
    "contract",
    "entries",
    "lines",
    "make_contract",
    "make_verdict",
    "merged",
    "now",
    "sender",
    "traffic",
]
