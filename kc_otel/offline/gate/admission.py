"""Taking the offline gate's evidence into a promotion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kc_otel.contract.model import Contract
from kc_otel.contract.words import listed, place
from kc_otel.judge.promotion.orders import whereabouts
from kc_otel.judge.promotion.promotion_state import OrderError, Promotion, PromotionStatus
from kc_otel.judge.promotion.stages import GateOutcome, Stage
from kc_otel.judge.verdict import Status
from kc_otel.offline.gate.evidence import EvidenceError, verify_evidence

__all__ = ["admit"]


def admit(promotion: Promotion, contract: Contract, record: Mapping[str, Any]) -> Promotion:
    """Take the evidence of the offline stage in.

    Args:
        promotion: A version in the offline stage.
        contract: The contract in force.
        record: What `kc-otel gate run ... --evidence` wrote.

    Raises:
        OrderError: If the version is not there, or the record is no sound evidence that its gate was open under this
            contract.
    """
    if promotion.position.stage is not Stage.OFFLINE_CI or promotion.status is not PromotionStatus.RUNNING:
        raise OrderError(f"{promotion.version} is not in offline-ci but {whereabouts(promotion)}")
    try:
        verify_evidence(record)
    except EvidenceError as error:
        raise OrderError(f"the evidence is not sound: {error}") from None
    if record["stage"] != Stage.OFFLINE_CI or "offline" not in record:
        raise OrderError(f"the evidence is of stage {record['stage']}; give what the offline stage's gate wrote")
    if record["kernel"] != promotion.version:
        raise OrderError(f"the evidence is about kernel {record['kernel']}, not about {promotion.version}")
    if record["contract"]["hash"] != contract.hash:
        raise OrderError(
            f"the evidence is of another contract ({record['contract']['name']} {record['contract']['hash'][:12]}) "
            f"than the one in force ({contract.name} {contract.hash[:12]}); run the gate again"
        )
    decision = record["decision"]
    if decision["outcome"] != GateOutcome.ADVANCE:
        raise OrderError(
            f"the offline gate says {decision['outcome']}: {'; '.join(decision['missing'])}; to go on all the same, "
            f"a person has to force it and say why"
        )
    open_rows = [row for row in record["verdicts"] if row["status"] != Status.PASS]
    if open_rows:
        places = listed([f"{row['clause']} on {place(row['slice'])}" for row in open_rows])
        raise OrderError(
            f"the offline gate was asked about a part (--require, --slice), and {places} did not pass; run it about "
            f"everything, or a person has to force it and say why"
        )
    return replace(promotion, offline=record["checksum"])
