"""Bodies of webhooks, made of alerts."""

from collections.abc import Sequence
from typing import Any

from kc_otel.contract.model import Contract
from kc_otel.judge.escalation.alerts import Transition
from kc_otel.judge.escalation.escalate import IncidentMessage, NoticeReason
from kc_otel.judge.escalation.webhook_body import alert_body
from kc_otel.judge.incidents.incident import Incident


def body_of(
    contract: Contract, edges: Sequence[Transition], reason: str = "", incident: Incident | None = None,
    lasting: int = 0, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """The body that the endpoint `pager` gets about these alerts; for no reason, that of the first of them."""
    why = NoticeReason(reason or edges[0].what.value)
    return alert_body(contract, IncidentMessage("pager", why, incident, tuple(edges), lasting), **more)
