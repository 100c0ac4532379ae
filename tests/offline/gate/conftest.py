import copy

from kc_otel.judge.promotion.gate_evidence import checksum_of
from tests.judge.promotion.conftest import contract, make_verdict

__all__ = ["changed", "contract", "make_verdict", "resealed"]


def changed(record, path, value):
    """A copy of a record of evidence with another value at a path, under the old checksum."""
    new = copy.deepcopy(record)
    inner = new
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return new


def resealed(record):
    """A record under the checksum of its content."""
    content = {name: value for name, value in record.items() if name != "checksum"}
    return content | {"checksum": checksum_of(content)}
