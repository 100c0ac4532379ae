from tests.judge.promotion.conftest import contract, make_verdict

__all__ = ["contract", "make_verdict"]
