from tests.judge.decisions.conftest import contract, make_contract, make_transition

__all__ = ["contract", "make_contract", "make_transition"]
