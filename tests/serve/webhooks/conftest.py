from tests.judge.escalation.conftest import connection, make_contract, make_verdict, receiver

__all__ = ["connection", "make_contract", "make_verdict", "receiver"]
