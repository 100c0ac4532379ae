"""All that one process sends has one owner, and few senders have another one when shards come or go."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.serve.shards.sharded_sink import owner, split


def request(*senders: dict[str, str]) -> ExportMetricsServiceRequest:
    found = ExportMetricsServiceRequest()
    for number, attributes in enumerate(senders):
        resource = found.resource_metrics.add(schema_url="https://example.org")
        for key, value in attributes.items():
            resource.resource.attributes.add(key=key).value.string_value = value
        resource.scope_metrics.add().metrics.add(name=f"kc.drift.{number}")
    return found


def test_the_parts_of_an_export_are_all_of_it_each_with_its_owner() -> None:
    """A Collector's export of many senders: every resource is in the part of its owner, once, with all that it has."""
    whole = request(*({"service.instance.id": str(number)} for number in range(40)))
    parts = split(whole.SerializeToString(), 3)
    assert sorted(parts) == [0, 1, 2]
    found = {shard: ExportMetricsServiceRequest.FromString(part) for shard, part in parts.items()}
    for resource in whole.resource_metrics:
        alone = ExportMetricsServiceRequest(resource_metrics=[resource]).SerializeToString()
        [(shard, only)] = split(alone, 3).items()
        assert resource in found[shard].resource_metrics
        assert ExportMetricsServiceRequest.FromString(only).resource_metrics[0] == resource
    assert sum(len(part.resource_metrics) for part in found.values()) == 40


def test_a_sender_is_the_set_of_its_attributes() -> None:
    """Their order, and fields that are not known yet, change nothing."""
    for number in range(20):
        pairs = {"service.instance.id": str(number), "host.name": "a"}
        [shard] = split(request(pairs).SerializeToString(), 7)
        turned = request(dict(reversed(pairs.items())))
        assert list(split(turned.SerializeToString(), 7)) == [shard]
        later = request(pairs).SerializeToString() + b"\x98\x06\x01"
        assert list(split(later, 7)) == [shard]


@given(st.integers(0, 2**64 - 1), st.integers(1, 60))
def test_a_shard_more_takes_senders_and_moves_none_between_others(key: int, shards: int) -> None:
    """Who is not moved to the new shard stays where it was."""
    before, after = owner(key, shards), owner(key, shards + 1)
    assert 0 <= before < shards
    assert after in {before, shards}


def test_senders_are_spread_evenly() -> None:
    """Of 20,000 senders each of 8 shards has an eighth, within a tenth."""
    rng = random.Random(0)
    counts = [0] * 8
    for _ in range(20_000):
        counts[owner(rng.getrandbits(64), 8)] += 1
    assert max(abs(count - 2500) for count in counts) < 250
