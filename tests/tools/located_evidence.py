"""What `locate` puts on an incident, of a model with two layers whose second one has a wrong product."""

from typing import Any


def _row(layer: int | None, operator: str, own: float, drift: float) -> dict[str, Any]:
    def interval(value: float) -> dict[str, Any]:
        return {"estimate": value, "lower": "-inf", "upper": "inf", "samples": 8, "method": "m", "note": ""}

    return {
        "boundary": {"layer": layer, "operator": operator, "part": 0},
        "local": interval(own),
        "drift": interval(drift),
        "floor": 2e-3,
        "train_noise": 0.0,
        "inference_noise": 1e-4,
        "prefill": drift,
        "decode": "nan",
        "precision": "nan" if layer is None else 2e-3,
        "above": interval(0.0),
        "is_above": own > 4e-3,
    }


def located_evidence(operator: str = "o_proj") -> dict[str, Any]:
    """As `located_json` has it; the operator at fault is named so."""
    rows = [
        _row(None, "embedding", 1.6e-3, 1.6e-3),
        *(_row(layer, part, 1.8e-3, 2e-3 * (layer + 1)) for layer in (0, 1) for part in ("qkv_proj", "attention")),
        _row(1, operator, 0.08, 0.081),
        _row(None, "head", 1.9e-3, 0.06),
    ]
    culprit = {"kind": "drift", "boundary": rows[5]["boundary"], "module": "m", "sentence": "s", "tensors": []}
    return {"slice": "code", "boundaries": rows, "culprit": culprit, "contract": "policy", "notes": []}
