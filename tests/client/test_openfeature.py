"""The decision table through OpenFeature's own client."""

import pytest
from openfeature import api
from openfeature.evaluation_context import EvaluationContext
from openfeature.exception import ErrorCode
from openfeature.flag_evaluation import Reason

from kc_otel.client.openfeature import KernelProvider
from kc_otel.client.router import Router
from kc_otel.judge.decisions import Canary, DecisionTable, apply, changed


@pytest.fixture
def client(contract):
    """A function from transitions, and a clock, to a client whose flags are the table after them."""

    def make(*transitions, now=lambda: 0.0, stale_after=60.0):
        table = apply(DecisionTable(), transitions, contract, 100.0)
        router = Router.from_table(table, contracts=[contract], stale_after=stale_after, clock=now)
        api.set_provider(KernelProvider(router))
        return api.get_client()

    yield make
    api.shutdown()
    api.clear_providers()


def context(user=None, **attributes):
    """An evaluation context, `kernel` for the version that would serve, `user` for the targeting key."""
    named = {"kc.kernel.inference" if name == "kernel" else name: value for name, value in attributes.items()}
    return EvaluationContext(targeting_key=user, attributes=named)


def test_a_routed_slice_goes_to_the_training_kernel_and_the_rest_stays(client, make_transition):
    flags = client(make_transition(slice="code"))
    routed = flags.get_string_details("policy-7b", "inference-kernel", context(task="code", prompt_tokens=9))
    assert (routed.value, routed.reason, routed.variant) == ("train-kernel", Reason.TARGETING_MATCH, "train-kernel")
    assert routed.flag_metadata == {"table": 1, "reason": "0.008 is above 0.004"}
    other = flags.get_string_details("policy-7b", "train-kernel", context(task="prose"))
    assert (other.value, other.reason) == ("inference-kernel", Reason.DEFAULT)
    assert flags.get_boolean_value("policy-7b", True, context(task="code")) is False
    assert flags.get_boolean_value("policy-7b", False, context(task="prose")) is True


def test_directives_are_flags_too(client, make_transition):
    flags = client(make_transition(do=("halt", "sample-more", "resync-weights")))
    halted = flags.get_boolean_details("policy-7b.halted", False)
    assert halted.value
    assert str(halted.flag_metadata["reason"]).startswith("0.008 is above 0.004, of inferB since")
    fixed = EvaluationContext(attributes={"kc.kernel.inference": "fixed"})
    assert not flags.get_boolean_value("policy-7b.halted", False, fixed)
    assert flags.get_float_value("policy-7b.sampling", 0.1, fixed) == 0.1
    assert flags.get_boolean_value("policy-7b.held", True) is False
    assert flags.get_boolean_value("policy-7b.resync", False) is True
    assert flags.get_float_value("policy-7b.sampling", 0.05) == 1.0
    assert client().get_float_value("policy-7b.sampling", 0.05) == 0.05


def test_a_canary_is_a_split_by_the_targeting_key(contract):
    canary = Canary("policy-7b", "inferB", 0.3, "canary, step 2 of 3", 1.0)
    table = changed(DecisionTable(), 1.0, canaries=[canary])
    router = Router.from_table(table, contracts=[contract])
    api.set_provider(KernelProvider(router))
    flags = api.get_client()
    found = set()
    for number in range(100):
        asked = context(f"user-{number}", task="code", kernel="inferB")
        details = flags.get_string_details("policy-7b", "none", asked)
        assert details.value == router.choose("policy-7b", {"task": "code"}, "inferB", key=f"user-{number}")
        assert (details.reason, details.variant) == (Reason.SPLIT, details.value)
        assert details.flag_metadata == {"table": 1, "reason": "canary, step 2 of 3", "weight": 0.3}
        assert flags.get_boolean_value("policy-7b", False, asked) is (details.value == "inference-kernel")
        found.add(details.value)
    assert found == {"train-kernel", "inference-kernel"}
    api.shutdown()
    api.clear_providers()


def test_what_is_not_known_gives_the_callers_default(client):
    flags = client()
    unknown = flags.get_string_details("other", "inference-kernel", context(task="code"))
    assert (unknown.value, unknown.error_code) == ("inference-kernel", ErrorCode.FLAG_NOT_FOUND)
    assert flags.get_integer_details("policy-7b", 3).error_code is ErrorCode.TYPE_MISMATCH
    assert flags.get_object_details("policy-7b", {}).error_code is ErrorCode.TYPE_MISMATCH
    assert flags.get_float_details("policy-7b", 1.0).error_code is ErrorCode.FLAG_NOT_FOUND


def test_a_stale_table_says_so(client, make_transition):
    clock = [0.0]
    flags = client(make_transition(slice="code"), now=lambda: clock[0])
    clock[0] = 1000.0
    details = flags.get_string_details("policy-7b", "inference-kernel", context(task="code"))
    assert (details.value, details.reason) == ("train-kernel", Reason.STALE)
