"""Bodies of webhooks, made of alerts."""

from collections.abc import Sequence
from typing import Any

from kc_otel.contract.model import Contract
from kc_otel.judge.escalation.alerts import Alert
from kc_otel.judge.escalation.escalate import IncidentMessage, MessageReason
from kc_otel.judge.escalation.webhook_body import alert_body
from kc_otel.judge.incidents.incident import Incident


def body_of(
    contract: Contract, edges: Sequence[Alert], reason: str = "", incident: Incident | None = None,
    lasting: int = 0, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """The body that the endpoint `pager` gets about these alerts; for no reason, that of the first of them."""
    why = MessageReason(reason or edges[0].phase.value)
    more.setdefault("at", max(edge.at for edge in edges))
    return alert_body(contract, IncidentMessage("pager", why, incident, tuple(edges), lasting), **more)
