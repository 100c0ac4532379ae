from tests.judge.conftest import contract, merged, now, sender
from tests.judge.escalation.conftest import connection, make_contract, make_verdict
from tests.offline.replay.conftest import entries, traffic

__all__ = ["connection", "contract", "entries", "make_contract", "make_verdict", "merged", "now", "sender", "traffic"]
