import logging
import subprocess
import sys
import threading
import time
from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kc_otel.client import poll
from kc_otel.client.router import Router
from kc_otel.contract.words import moment
from kc_otel.judge.decisions import Canary, DecisionTable, Promoted, Route, apply
from kc_otel.judge.plain_json import to_json
from tests.tools.servers import answering
from tests.tools.waiting import eventually

LONG, CODE, PROSE = {"prompt_tokens": 9000}, {"task": "code", "prompt_tokens": 10}, {"task": "prose"}


class Evaluator:
    """The decisions endpoint of an evaluator: answers at once when its version differs, else holds on."""

    def __init__(self):
        self.table = DecisionTable()
        self.changed = threading.Condition()
        self.asked = []
        self.obeys = self.kept = None
        self.closed = []
        self.raw = None
        self.age = 0
        self.unserved = ""
        self.stopping = False

    def respond(self, path, _headers, _body):
        query = parse_qs(urlsplit(path).query)
        after, wait = int(query["after"][0]), float(query["wait"][0])
        if "closing" in query:
            self.closed += query["instance"]
            return 204, {}, b""
        self.asked.append((urlsplit(path).path, after))
        self.wait = wait
        self.obeys, self.kept = query.get("obeys", []), query.get("kept", [])
        self.instance = query["instance"][0]
        with self.changed:
            self.changed.wait_for(lambda: self.stopping or self.table.version != after or self.raw, wait)
            body = self.raw or to_json(self.table).encode()
            unchanged = self.raw is None and self.table.version == after
        headers = {"age": str(self.age)} | ({"kc-unserved": self.unserved} if self.unserved else {})
        headers |= {"connection": "close"} if self.stopping else {}
        return (304, headers, b"") if unchanged else (200, headers, body)

    def publish(self, table):
        with self.changed:
            self.table = table
            self.changed.notify_all()


@pytest.fixture
def evaluator():
    made = Evaluator()
    with answering(made.respond) as made.url:
        yield made
        with made.changed:
            made.stopping = True
            made.changed.notify_all()


@pytest.fixture
def routed(contract, make_transition):
    return apply(DecisionTable(), [make_transition()], contract, 100)


def test_one_slice_is_routed_away_while_the_rest_stays_or_all_traffic(contract, routed, make_transition):
    router = Router.from_table(routed, contracts=[contract])
    assert router.choose("policy-7b", CODE, "inferB") == "train-kernel"
    assert router.choose("policy-7b", CODE, "inferC") == "inference-kernel"
    assert router.choose("policy-7b", PROSE, "inferB") == "inference-kernel"
    assert router.choose("policy-7b", LONG, "inferB") == "inference-kernel"
    assert router.choose("policy-7b", CODE) == "train-kernel"
    whole = Router.from_table(apply(routed, [make_transition(slice="all")], contract, 1), contracts=[contract])
    assert {whole.choose("policy-7b", about, "inferB") for about in (PROSE, {}, [])} == {"train-kernel"}


@pytest.mark.parametrize("names", [("code",), ["all", "code"], {"code"}, "code", iter(["code"])])
def test_slices_can_be_given_by_name(routed, names):
    router = Router.from_table(routed)
    assert router.choose("policy-7b", names, "inferB") == "train-kernel"
    assert router.choose("policy-7b", ["long-context"], "inferB") == "inference-kernel"
    assert router.choose("other", ["code"], "inferB") == "inference-kernel"


def test_attributes_without_the_contract_are_an_error_at_the_first_call():
    with pytest.raises(LookupError, match=r"Router\(contracts="):
        Router.from_table(DecisionTable()).choose("policy-7b", CODE)


def test_slice_that_the_local_contract_does_not_know_is_logged(contract, make_transition, caplog):
    table = apply(DecisionTable(), [make_transition(slice="newer")], contract, 1)
    with caplog.at_level(logging.WARNING):
        router = Router.from_table(table, contracts=[contract])
    assert "no slice 'newer'" in caplog.text
    assert router.choose("policy-7b", CODE, "inferB") == "inference-kernel"
    assert router.choose("policy-7b", ["newer"], "inferB") == "train-kernel"


def test_stale_table_keeps_its_routes_and_serves_nothing_unproven(routed, caplog):
    """An outage lifts no route; what no route covers goes to what was promoted to full; it is said once each time."""
    now = [0.0]
    table = replace(routed, promoted=(Promoted("policy-7b", "inferB", 1.0), Promoted("other", "inferC", 1.0)))
    router = Router.from_table(table, stale_after=60, trusted=["inferT"], clock=lambda: now[0])
    for version in ("inferB", "inferC", "inferT", None):
        assert router.choose("policy-7b", ["long-context"], version) == "inference-kernel"
    now[0] = 61.0
    assert router.stale
    with caplog.at_level(logging.WARNING):
        assert router.choose("policy-7b", ["code"], "inferB") == "train-kernel"
        assert not caplog.text
        assert router.choose("policy-7b", ["long-context"], "inferB") == "inference-kernel"
        assert router.choose("policy-7b", ["long-context"], "inferT") == "inference-kernel"
        for version in ("inferC", None):
            choice = router.decide("policy-7b", ["long-context"], version)
            assert (choice.kernel, choice.cause) == ("train-kernel", "stale")
            assert "promoted to full" in choice.reason
    assert caplog.text.count("no answer for 60 s: requests") == 1
    assert "promoted to full or are trusted (inferB, inferC, inferT), else to the training kernel" in caplog.text


def test_before_the_first_table_nothing_unproven_serves(caplog):
    with caplog.at_level(logging.WARNING), Router("http://127.0.0.1:9", keep=False, trusted=["stable"]) as router:
        for _ in range(100):
            assert router.choose_version("policy-7b", [], ["candidate", "stable"]) == "stable"
            assert router.choose_version("policy-7b", [], ["candidate"]) is None
    assert caplog.text.count("no decision table yet: requests") == 1


def test_a_version_whose_promotion_nobody_has_started_gives_way(contract):
    versions = ["candidate", "stable"]
    fresh = Router.from_table(DecisionTable(1), contracts=[contract])
    assert fresh.choose_version("policy-7b", CODE, versions) == "stable"
    assert fresh.choose_version("policy-7b", CODE, ["candidate"]) == "candidate"
    assert fresh.choose_version("policy-7b", CODE, []) is None
    known = Router.from_table(DecisionTable(1), contracts=[contract], trusted=["candidate"])
    assert known.choose_version("policy-7b", CODE, versions) == "candidate"
    full = Router.from_table(DecisionTable(1, promoted=(Promoted("policy-7b", "candidate", 1.0),)))
    assert full.choose_version("policy-7b", [], versions) == "candidate"


def test_the_reason_for_a_slice_is_the_first_alerts(contract, make_transition):
    table = apply(DecisionTable(), [make_transition(do=("locate",))], contract, 1)
    (first,) = table.directives
    both = replace(table, directives=(first, replace(first, reason="another clause", fingerprint="another")))
    assert Router.from_table(both).to_locate("policy-7b") == {"code": first.reason}


def test_directives_about_another_version_are_ignored(contract, make_transition):
    """A run that was started with another kernel goes on; one that does not know its version obeys all."""
    asked = make_transition(do=("sample-more", "locate", "hold-promotion", "halt", "quarantine-rollouts"))
    router = Router.from_table(apply(DecisionTable(), [asked], contract, 1))
    lifted = "once it is mended or stopped, `kc-otel alerts ack policy-7b --close --why ...` lifts the halt"
    halted = f"0.008 is above 0.004, of {asked.cell.kernel_inference} since {moment(asked.started_at)}; {lifted}"
    for version in (None, asked.cell.kernel_inference):
        assert router.sampling("policy-7b", 0.05, version) == 1.0
        assert (router.halted("policy-7b", version), router.held("policy-7b", version)) == (halted, halted[:20])
        quarantined = router.quarantined("policy-7b", version)
        assert quarantined == router.to_locate("policy-7b", version) == {"code": "0.008 is above 0.004"}
    for about in (("policy-7b", "fixed"), ("other", None)):
        assert router.sampling(about[0], 0.05, about[1]) == 0.05
        assert router.halted(*about) is router.held(*about) is None
        assert router.quarantined(*about) == router.to_locate(*about) == {}


def test_change_arrives_by_long_poll(evaluator, contract, routed):
    with Router(evaluator.url + "/", contracts=[contract], refresh=0.01) as router:
        assert router.wait_for_table(10)
        assert not router.stale
        assert router.choose("policy-7b", CODE, "inferB") == "inference-kernel"
        eventually(lambda: len(evaluator.asked) == 2)
        evaluator.publish(routed)
        eventually(lambda: router.table.version == 1)
        assert router.choose("policy-7b", CODE, "inferB") == "train-kernel"
        eventually(lambda: len(evaluator.asked) == 3)
    assert evaluator.asked == [("/api/v1/decisions", -1), ("/api/v1/decisions", 0), ("/api/v1/decisions", 1)]


def test_a_table_of_a_lower_version_is_of_an_evaluator_that_lost_its_state(evaluator, routed):
    evaluator.publish(replace(routed, version=7))
    with Router(evaluator.url, refresh=0.01, keep=False) as router:
        eventually(lambda: router.table.version == 7)
        evaluator.publish(DecisionTable(3))
        eventually(lambda: router.table == DecisionTable(3))


def test_no_answer_is_held_back_until_the_table_is_stale(evaluator):
    with Router(evaluator.url, refresh=0.01, stale_after=0.5, keep=False):
        eventually(lambda: len(evaluator.asked) == 2)
    assert evaluator.wait == 0.25


@pytest.mark.slow
def test_an_evaluator_that_answers_and_does_not_evaluate_watches_nothing(evaluator, routed, caplog):
    """Its table is taken, and ages: a version that is being tried serves nothing after a while, and it is said once."""
    evaluator.age = 31
    evaluator.publish(routed)
    options = {"refresh": 0.01, "wait": 0.05, "stale_after": 0.5, "keep": False}
    with caplog.at_level(logging.WARNING), Router(evaluator.url, **options) as router:
        eventually(lambda: router.table.version == 1)
        assert router.stale
        assert router.decide("policy-7b", ["prose"], "inferB").cause == "stale"
        assert router.choose("policy-7b", ["code"], "inferB") == "train-kernel"
        eventually(lambda: "nothing has been evaluated for 31 s" in caplog.text)
        evaluator.age = 2
        eventually(lambda: not router.stale)
    assert caplog.text.count("nothing has been evaluated") == 1


def test_nothing_unproven_serves_under_a_contract_that_the_evaluator_does_not_judge(evaluator, caplog):
    """Its name is misspelt, its file is gone or its policy fails: no FAIL would take a canary back. It is said once."""
    evaluator.unserved = "polcy-7b other"
    options = {"refresh": 0.01, "wait": 0.02, "keep": False, "trusted": ["inferA"]}
    with caplog.at_level(logging.WARNING), Router(evaluator.url, **options) as router:
        eventually(lambda: not router.stale)
        eventually(lambda: router.decide("polcy-7b", ["code"], "inferB").cause == "stale")
        assert router.choose("polcy-7b", ["code"], "inferB") == "train-kernel"
        assert router.choose("polcy-7b", ["code"], "inferA") == "inference-kernel"
        eventually(lambda: router.choose("policy-7b", ["code"], "inferB") == "inference-kernel")
        assert not router.stale
        evaluator.unserved = ""
        eventually(lambda: router.choose("polcy-7b", ["code"], "inferB") == "inference-kernel")
    assert caplog.text.count("does not judge contract polcy-7b other: of its kernels only versions that") == 1


@pytest.mark.slow
def test_a_contract_that_the_evaluator_has_not_heard_of_yet_gives_nothing_unproven(evaluator):
    """It is told during the request that is held back, and not only with the next one."""
    with Router(evaluator.url, refresh=0.01, wait=60.0, keep=False, trusted=["inferA"]) as router:
        eventually(lambda: len(evaluator.asked) == 2)
        assert not router.stale
        assert router.choose("policy-7b", ["code"], "inferB") == "train-kernel"
        assert router.choose("policy-7b", ["code"], "inferA") == "inference-kernel"
        eventually(lambda: evaluator.obeys == ["policy-7b/route"])


def test_closing_does_not_wait_for_a_held_request(evaluator):
    router = Router(evaluator.url, refresh=0.01)
    eventually(lambda: len(evaluator.asked) == 2)
    began = time.monotonic()
    router.close()
    assert time.monotonic() - began < 1.5
    assert not router._poller.is_alive()


def test_a_process_that_ends_without_closing_its_router_tells_the_evaluator(evaluator):
    program = "import sys; from kc_otel.client.router import Router; Router(sys.argv[1], keep=False).wait_for_table(60)"
    subprocess.run([sys.executable, "-c", program, evaluator.url], check=True, timeout=120)
    assert evaluator.closed == [evaluator.instance]


def test_a_router_that_is_closed_after_an_outage_and_before_it_asks_again_tells_the_evaluator(evaluator, caplog):
    with caplog.at_level(logging.WARNING), Router(evaluator.url, refresh=0.01, wait=0.1) as router:
        eventually(lambda: not router.stale)
        evaluator.raw = b"[]"
        eventually(lambda: "stays in force" in caplog.text)
    assert evaluator.closed == [evaluator.instance]


def test_nonsense_from_the_evaluator_changes_nothing(evaluator, routed, caplog):
    evaluator.publish(routed)
    with caplog.at_level(logging.WARNING), Router(evaluator.url, refresh=0.01) as router:
        eventually(lambda: router.table.version == 1)
        for raw in (b"[]", b'{"version": 2}', b"\xff", b'{"version": 2, "at": 0, "routes": [{}]}'):
            with evaluator.changed:
                evaluator.raw = raw
                evaluator.changed.notify_all()
        eventually(lambda: "stays in force" in caplog.text)
        assert router.table == routed


def test_a_router_that_never_had_a_table_says_of_none_that_it_stays_in_force(evaluator, routed, caplog):
    """A trainer that starts before its evaluator has no directive yet."""
    evaluator.raw = b"[]"
    with caplog.at_level(logging.WARNING), Router(evaluator.url, refresh=0.01, keep=False):
        eventually(lambda: "no decision table" in caplog.text)
        evaluator.raw = None
        evaluator.publish(routed)
        eventually(lambda: "decision tables arrive" in caplog.text)
    assert "stays in force" not in caplog.text


def test_a_wrong_url_is_refused():
    with pytest.raises(ValueError, match="evaluator:4319"):
        Router("evaluator:4319")


VALUES = st.sampled_from(["code", "CODE", "prose", "true", "1", 1, 1.0, True, False, 8192, 9000.5])


@pytest.mark.slow
@given(
    where=st.dictionaries(st.sampled_from(["task", "prompt_tokens"]), VALUES),
    conditions=st.dictionaries(
        st.sampled_from(["task", "prompt_tokens"]),
        VALUES | st.lists(VALUES, min_size=1) | st.sampled_from([">= 8192", "!= code", "> 1, < 9000"]),
        min_size=1,
    ),
)
@example(where={"task": "1"}, conditions={"task": ["code", 1]})
@example(where={"task": "true"}, conditions={"task": ["code", True]})
def test_attributes_match_exactly_as_the_contract_says(contract, where, conditions):
    varied = type(contract).model_validate(
        contract.model_dump(mode="json", by_alias=True) | {"slices": {"code": {"where": conditions}}}
    )
    route = Route("policy-7b", "code", "inferB", "trainA", "train-kernel", "token-tv", "broken", 0.0)
    router = Router.from_table(DecisionTable(version=1, routes=(route,)), contracts=[varied])
    expected = "train-kernel" if "code" in varied.slices_of(where) else "inference-kernel"
    assert router.choose("policy-7b", where, "inferB") == expected


def test_the_evaluator_is_told_which_directives_the_program_looks_at(evaluator):
    with Router(evaluator.url, refresh=0.01, wait=0.05) as router:
        assert router.wait_for_table(5)
        router.choose("policy", ["code"])
        eventually(lambda: evaluator.obeys == ["policy/route"])
        router.sampling("policy", 0.1)
        router.halted("policy")
        for number in range(200):
            router.quarantined(f"c{number}")
        eventually(lambda: len(evaluator.obeys) >= 64)
        assert {"policy/sample-more", "policy/halt", "c0/quarantine-rollouts"} <= set(evaluator.obeys)
        assert len(evaluator.obeys) == 64


def test_what_a_router_begins_to_keep_is_told_before_the_evaluator_answers(evaluator, contract, routed, monkeypatch):
    """A breach counts as contained once the evaluator knows, and an answer may be held back for half a minute."""
    monkeypatch.setattr(poll, "_NEWS_SECONDS", 0.02)
    with Router(evaluator.url, contracts=[contract], refresh=0.01, wait=25.0, keep=False) as router:
        assert router.wait_for_table(5.0)
        router.choose("policy-7b", CODE, "inferB")
        evaluator.publish(routed)
        eventually(lambda: router.table.routes and evaluator.asked[-1][1] == routed.version)
        asked = len(evaluator.asked)
        router.choose("policy-7b", CODE, "inferB")
        eventually(lambda: evaluator.kept == ["policy-7b/code/inferB"], seconds=15.0)
        router.choose("policy-7b", CODE, "inferB")
        assert len(evaluator.asked) == asked + 1


def test_a_router_with_contracts_says_that_it_routes_before_its_first_request(evaluator, contract):
    """It counts for an order from then on: where it is cut off, its first request goes by the table of before."""
    with Router(evaluator.url, contracts=[contract], refresh=0.01, wait=0.05) as router:
        assert router.wait_for_table(5)
        assert evaluator.obeys == ["policy-7b/route"]


@pytest.mark.slow
def test_a_router_says_by_which_slices_it_routes_and_what_it_keeps_from_a_version_that_it_served(
    evaluator, contract, routed
):
    """Its copy of the contract may be another; a process that never sent a request to the version keeps none of it."""
    older = type(contract).model_validate(contract.model_dump(mode="json", by_alias=True) | {"slices": {}})
    own = f"/{contract.slice_ids['code']}"
    for copy, before, defined, kept in (
        (contract, CODE, own, ["policy-7b/code/inferB"]),
        (contract, None, own, []),
        (older, CODE, "", []),
    ):
        evaluator.table = DecisionTable()
        with Router(evaluator.url, contracts=[copy], refresh=0.05, wait=0.2, keep=False) as router:
            router.wait_for_table(5.0)
            if before is not None:
                router.choose("policy-7b", before, "inferB")
            evaluator.table = routed
            eventually(lambda: router.table.routes)
            router.choose("policy-7b", CODE, "inferB")
            asked = len(evaluator.asked)
            eventually(lambda: len(evaluator.asked) > asked + 2)  # noqa: B023
            assert evaluator.obeys == [f"policy-7b/route{defined}"]
            assert evaluator.kept == kept


@pytest.mark.slow
def test_an_evaluator_that_has_sent_no_table_yet_is_none(evaluator):
    """A proxy that answers 304, or 204, says nothing of what may serve."""
    evaluator.table = DecisionTable(-1)
    with Router(evaluator.url, keep=False, refresh=0.01, wait=0.0) as router:
        eventually(lambda: len(evaluator.asked) > 2)
        assert router.choose_version("policy-7b", [], ["new"]) is None


@pytest.mark.parametrize("key", [17, 17.5, ("a", 1), b"17", "17", np.str_("17")])
def test_any_key_has_its_place_in_a_share(key):
    """Users are integers in some services; equal text is the same place. One version alone is no list of letters."""
    router = Router.from_table(DecisionTable(1, canaries=(Canary("c", "new", 0.5, "canary", 1.0),)), trusted=["old"])
    found = {router.choose_version("c", [], ["new", "old"], key=key) for _ in range(20)}
    assert len(found) == 1
    assert router.choose_version("c", [], "old", key=key) == "old"
