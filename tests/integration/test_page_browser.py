"""The page and the report in a real Chromium: what a person sees, hears and types, with a real evaluator behind it."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

import kc_otel
from kc_otel.client.router import Router
from kc_otel.contract.load import load_text
from kc_otel.recordings.request import SampledRequest
from kc_otel.recordings.worst_sequences import WorstSequences
from tests.tools.access import access_of, token_of
from tests.tools.located_evidence import located_evidence

from .conftest import CONTRACT, Evaluator, Traffic, command, logprobs, wrong

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient")]

MARKUP = "<img src=x onerror=document.title='broken-in'>"
BAD = kc_otel.Kernel("vllm", version="2", dtype="int8", hardware=MARKUP)
CALM = {"code": 0.005, "prose": 0.005}
READY = "document.querySelector('#live-dot.ok')"
INCIDENT_FITS = "document.querySelector('#incident').scrollWidth <= document.querySelector('#incident').clientWidth"
NO_SIDEWAYS = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture
def recorder(contract_file: Path) -> Iterator[Callable[[Evaluator], Traffic]]:
    made: list[Traffic] = []

    def make(evaluator: Evaluator) -> Traffic:
        exporter = OTLPMetricExporter(endpoint=f"{evaluator.http}/v1/metrics", timeout=5)
        made.append(Traffic(contract_file, exporter))
        return made[-1]

    yield make
    for traffic in made:
        traffic.recorder.shutdown()


def breached(serve: Callable[..., Evaluator], recorder: Callable[..., Traffic]) -> Evaluator:
    """An evaluator whose newest kernel version breaks the promise on code, and a route that followed."""
    evaluator = serve()
    traffic = recorder(evaluator)
    traffic.send(**CALM)
    traffic.recorder.rollout(inference=BAD)
    end = time.monotonic() + 60
    # One that sent requests to the kernel and then keeps them from it, or nothing is contained.
    with Router(evaluator.api, contracts=[load_text(CONTRACT)], refresh=0.05, wait=0.2) as router:
        assert router.wait_for_table(5)
        while not evaluator.get("/api/v1/decisions")["routes"]:
            assert time.monotonic() < end, evaluator.get("/api/v1/verdicts")
            router.choose("policy", ["code"], BAD.fingerprint)
            traffic.send(code=0.2, prose=0.005)
            time.sleep(0.2)
        while not evaluator.get("/api/v1/incidents", state="contained")["incidents"]:
            assert time.monotonic() < end, evaluator.get("/api/v1/incidents")
            router.choose("policy", ["code"], BAD.fingerprint)
            time.sleep(0.1)
    return evaluator


@pytest.fixture
def broken(serve: Callable[..., Evaluator], recorder: Callable[..., Traffic]) -> Evaluator:
    return breached(serve, recorder)


def cell_of(evaluator: Evaluator) -> str:
    cells = evaluator.get("/api/v1/verdicts")["verdicts"]
    verdict = next(cell for cell in cells if cell["slice"] == "code" and cell["kernel_inference"] == BAD.fingerprint)
    return f"#/cell/policy/token-tv/code/{verdict['kernel_train']}/{verdict['kernel_inference']}"


def test_a_breach_is_told_in_words_to_eyes_ears_and_keyboards(browser: Any, broken: Evaluator) -> None:
    """What is broken, since when, for whom, what was done; without one request elsewhere or one line in the console."""
    browser.open(broken.api)
    browser.wait("document.querySelector('.incident .actions-taken')")
    said = browser.evaluate("document.querySelector('main').innerText")
    assert "1 promise is broken on code" in said
    assert "above its limit on code" in said  # "is", or "was" once it is silent as ordered
    assert "limit of 0.02" in said
    assert "to the training kernel" in said
    assert "pager" in said
    browser.wait("document.querySelector('#events').innerText.includes('Then:')")
    assert "webhook to pager due" in browser.evaluate("document.querySelector('#events').innerText")
    assert f"vllm 2 int8 ({BAD.fingerprint})" in said
    assert browser.evaluate("document.title").startswith("◐ 1 contained")
    assert browser.evaluate("document.querySelector('#contracts [role=img]').ariaLabel") == "Contained"

    browser.wait("document.querySelector('.incident .spark .chart')")
    told = browser.accessible()
    roles = {role for role, _ in told}
    assert {"banner", "main", "navigation", "contentinfo", "table", "columnheader", "rowheader", "status"} <= roles
    names = [name for role, name in told if role == "link"]
    assert any(name.startswith("token-tv on code: Fail") for name in names)
    headings = [name for role, name in told if role == "heading"]
    assert headings[0] == "1 promise is broken on code, and contained"
    assert all(name for role, name in told if role in {"button", "link", "checkbox", "searchbox"})

    # The longest thing that a mark says, in a grid too narrow for it, stays inside of its border.
    outside = """(() => {
      const mark = document.querySelector('.mark.fail');
      const [word, used] = ['.word', '.used'].map((each) => mark.querySelector(each));
      document.querySelector('.grid').style.setProperty('--clauses', 12);
      [word.textContent, used.textContent] = ['Inconclusive', '320.5K more'];
      mark.style.width = '9rem';
      const edge = mark.getBoundingClientRect().right, text = used.getBoundingClientRect().right;
      mark.style.width = '';
      return text - edge;
    })()"""
    assert browser.evaluate(outside) <= 0

    browser.evaluate("document.querySelector('.mark.fail').focus()")
    browser.press("Enter")
    browser.wait("document.querySelector('#cell').open && document.querySelector('#history-chart .chart')")
    browser.wait("document.querySelector('#cell-kernels td')")
    detail = browser.evaluate("document.querySelector('#cell').innerText")
    assert "lower bound" in detail
    assert re.search(r"FAIL (for .* of it, first )?at \d", detail)
    browser.press("Escape")
    browser.wait("!document.querySelector('#cell').open")
    assert browser.complaints() == []
    assert {url.split("/", 3)[2] for url in browser.requests() if url.startswith("http")} == {broken.api.split("/")[2]}


def test_what_is_told_in_one_line_of_many_alerts_or_cells_is_true_of_each(browser: Any, broken: Evaluator) -> None:
    """Alerts end together only in the same way, which is said; a cell says its version where a contract has several."""
    browser.open(broken.api)
    browser.wait("document.querySelector('.incident .actions-taken')")
    contained, over = " is contained: routers avoid the kernel, which is not repaired", " is resolved"
    ends = [("tv", "code", contained), ("tail", "code", contained), ("tv", "all", over)]
    events = [
        {
            "kind": "resolved", "at": 1, "contract": "policy",
            "data": {"clause": clause, "slice": slice, "severity": step, "actions": [step]},
            "message": f"policy: {clause} on {'all traffic' if slice == 'all' else f'slice {slice}'}{end}",
        }
        for clause, slice, end in ends
        for step in ("warning", "critical")
    ]  # fmt: skip
    lines = browser.evaluate(
        "import('/page/events.js').then(({ grouped, eventLine }) => "
        f"grouped({json.dumps(events)}).map((one) => eventLine(one, false).lastChild.textContent.trim()))"
    )
    assert lines == [
        "resolved tv and tail on code are contained: routers avoid the kernel, which is not repaired (4 alerts)",
        "resolved tv on all traffic is resolved (2 alerts)",
    ]
    fired = [
        {
            "kind": "firing", "at": 1, "contract": "policy", "message": "",
            "data": {"clause": clause, "slice": "code", "on": on, "actions": ["notify"]},
        }
        for on in ("inconclusive", "fail") for clause in ("tv", "tail")
    ]  # fmt: skip
    muted = fired[-1] | {"data": fired[-1]["data"] | {"silenced": ["1"], "actions": ["halt"]}, "message": "tv breaks"}
    lines = browser.evaluate(
        "import('/page/events.js').then(({ grouped, eventLine }) => "
        f"grouped({json.dumps([*fired, muted])}).map((one) => eventLine(one, false)).map((line) => "
        "[line.querySelector('.shape').className, line.lastChild.textContent.trim()]))"
    )
    assert lines == [
        ["shape open", "alert undecided: tv and tail on code (2 alerts) Then: announced in the log."],
        ["shape fail", "alert broken: tv and tail on code (2 alerts) Then: announced in the log."],
        ["shape fail", "alert tv breaks Silenced. Then: trainers asked to halt."],
    ]
    named = """import('/page/grid.js').then(async ({ showGrids }) => {
      const [{ contracts }, { verdicts }] = await Promise.all(
        ['contracts', 'verdicts'].map((one) => fetch(`/api/v1/${one}`).then((answer) => answer.json())));
      const cells = verdicts.filter((one) => one.slice !== 'prose' || one.kernel_inference === '%s');
      showGrids({ contracts, cells });
      return [...document.querySelectorAll('.mark')].filter((one) => one.getAttribute('aria-label').includes('prose'))
        .map((one) => one.querySelector('.kernel')?.textContent);
    })"""
    assert browser.evaluate(named % BAD.fingerprint) == [BAD.fingerprint]


def test_a_breach_that_is_over_but_for_its_route_is_not_shown_as_broken(browser, serve, recorder):
    evaluator = serve()
    traffic = recorder(evaluator)
    traffic.send(**CALM)
    traffic.recorder.rollout(inference=BAD)
    for drift, reached in (
        (0.2, lambda _: evaluator.get("/api/v1/decisions")["routes"]), (0.005, lambda row: row["only_route_left"]),
    ):  # fmt: skip
        end = time.monotonic() + 60
        while not [
            row for row in evaluator.get("/api/v1/overview")["incidents"] if row["on"] == "fail" and reached(row)
        ]:
            assert time.monotonic() < end, evaluator.get("/api/v1/overview")
            traffic.send(code=drift, prose=0.005)
            time.sleep(0.2)
    browser.open(evaluator.api)
    browser.wait("document.querySelector('.incident .badge')")
    assert "Route remains" in browser.evaluate("document.querySelector('.incident .badge').innerText")
    assert "broken on" not in browser.evaluate("document.querySelector('#overview-title').innerText")
    assert browser.evaluate("document.querySelector('#overview-title').className") != "fail"
    assert browser.evaluate("document.title") == "kc-otel"
    # The tab of a contract is no greener than its headline.
    assert browser.evaluate("document.querySelector('#contracts .shape').ariaLabel") == "Route remains"


def test_the_past_of_a_cell_by_time_or_by_the_trainers_step(browser, serve, recorder):
    """Where the trainer tells its steps there is a choice; by step, the axis and the table have them."""
    evaluator = serve()
    traffic = recorder(evaluator)
    traffic.send(**CALM)
    address = f"{evaluator.api}/#/cell/policy/token-tv/code"
    browser.open(address)
    browser.wait("document.querySelector('#history-chart .chart')")
    assert browser.evaluate("document.querySelector('#axes').hidden")
    for step in (400, 800):
        traffic.send(step, **CALM)
        time.sleep(1.0)
    browser.open(address)
    by_step = "document.querySelector('#axes button:nth-child(2)')"
    browser.wait(f"{by_step} && !document.querySelector('#axes').hidden")
    browser.evaluate(f"{by_step}.click()")
    browser.wait("document.querySelector('#history-chart').ariaLabel.endsWith('over steps')")
    assert browser.evaluate(f"{by_step}.getAttribute('aria-pressed')") == "true"
    browser.evaluate("document.querySelector('#history-table').parentElement.open = true")
    browser.wait("document.querySelector('#history-table td')")
    assert {"Step", "400", "800"} <= set(browser.evaluate("document.querySelector('#history-table').innerText").split())
    assert browser.complaints() == []


def test_charts_of_numbers_that_an_evaluator_may_answer(browser: Any, serve: Callable[..., Evaluator]) -> None:
    """Gaps, far limits, missing bounds, others and events; evidence of another program has no picture."""
    browser.open(serve().api)
    browser.wait(READY)

    def drawn(points: list[list[Any]], code: str, over: str = "time") -> Any:
        others = json.dumps([[*point[:7], None, None] for point in points[:2]])
        return browser.evaluate(f"""import('/page/past.js').then((page) => {{
          const series = [{{ kernel_train: 't', kernel_inference: 'new', points: {json.dumps(points)} }},
            {{ kernel_train: 't', kernel_inference: 'old', points: {others} }}];
          const cell = {{ contract: 'p', clause: 'tv', slice: 'code', kernel_train: 't', kernel_inference: 'new' }};
          const past = page.pastOf({{ series, step: 10 }}, cell, '{over}');
          const chart = page.historyChart(past, {{ title: 'x' }});
          return {code};
        }})""")

    past: list[list[Any]] = [
        [10.0, 0.01, 0.005, 0.015, 0.02, 9, 0, 0.0, 100],
        [20.0, None, None, None, 0.02, 0, 2, None, None],
        [90.0, 0.1, 0.08, None, 0.02, 99, 3, 1.0, 160],
        [100.0, 0.1, 0.08, 0.12, 0.02, 99, 3, 0.557, 200],
        [109.0, 0.1, 0.08, 0.12, 0.02, 99, 0, 0.1, 200],
    ]
    text = drawn(past, "chart.text")
    assert "Estimate 0.01 to 0.1 over 1 min 39 s" in text
    assert "FAIL for 19 s of it, first at" in text
    assert "1 other kernel version on the same slice." in text
    assert "Never FAIL in that time." in drawn(past[:2], "chart.text")
    at, upper, _, estimate, failing, limit, other = drawn(past, "chart.data")
    assert at == [10.0, 20.0, 55.0, 90.0, 100.0, 109.0]
    assert estimate[:4] == [0.01, None, None, 0.1], "nobody looked in between"
    assert failing == [None, None, None, 0.1, 0.1, None]
    assert upper[3] == drawn(past, "chart.scales.y.range")[1], "not bounded above"
    assert [limit[0], limit[-1], other[0]] == [0.02, 0.02, 0.01]
    assert drawn(past, "chart.rows[2][1].slice(1)") == ["✕ FAIL", "0.1", "0.08 to unbounded", "0.02", "99", "160"]
    assert drawn(past, "chart.data[0]", "step") == [100, 130, 160, 200], "of a step's evaluations the one that fails"
    assert drawn(past, "chart.data[4].at(-1)", "step") == 0.1
    for estimate in (1e-6, 50.0):
        far = [[at, estimate, estimate / 2, 2 * estimate, 0.02, 5, 0, 0.0, None] for at in (0.0, 10.0)]
        scale = drawn(far, "chart.scales.y")
        assert scale["distr"] == 3
        assert scale["range"][0] < min(estimate, 0.02) < max(estimate, 0.02) < scale["range"][1]
    held = "page.evidenceChart(past, 'x').rows.map(([, row]) => row[2])"
    assert drawn(past, held) == ["0 %", "\N{EN DASH}", "100 %", "55 %", "10 %"]
    assert drawn(past[1:2], "page.evidenceChart(past, 'x')") is None
    assert drawn([], "chart") is None

    told = [
        ("firing", {"clause": "tv", "slice": "code"}), ("acknowledged", {"by": "ada", "slice": "code"}),
        ("firing", {"clause": "tv", "slice": "prose"}), ("silenced", {"by": "ada", "slice": "prose"}),
        ("promotion", {}), ("resolved", {"clause": "tv", "slice": "code"}), ("verdict", {}),
    ]  # fmt: skip
    events = [{"at": 1, "kind": kind, "contract": "p", "message": "p: m", "data": data} for kind, data in told]
    marks = drawn(past, f"page.marksOf({json.dumps(events)}, cell)")
    assert [sign for _, _, sign in marks] == ["▲", "☞", "→", "▽"]
    assert marks[0][1] == "firing: m"


def test_evidence_of_a_depth(browser: Any, serve: Callable[..., Evaluator]) -> None:
    """A floor of zero is said to be none and not drawn on an axis of equal ratios."""
    browser.open(serve().api)
    browser.wait(READY)

    def made(name: str, *arguments: Any) -> Any:
        given = ", ".join(map(json.dumps, arguments))
        return browser.evaluate(f"import('/page/pictures.js').then((page) => page.{name}({given}))")

    chart = made("depthChart", located_evidence())
    assert chart["text"] == "7 boundaries in the order of execution. Marked: layer 1, o_proj."
    assert [one["label"] for one in chart["series"]][3] == "training kernel against itself: none"
    assert set(chart["data"][4]) == {None}
    assert chart["rows"][5][1][:2] == ["layer 1, o_proj", "0.08"]


def test_a_headline_says_no_more_than_is_known(browser: Any, serve: Callable[..., Evaluator]) -> None:
    """Undecided is not green, input that fails its checks breaks no promise, and who never reported has not stopped."""
    browser.open(serve().api)
    browser.wait("document.querySelector('.mark')")

    def shown(counts: dict[str, int], *incidents: dict[str, Any], heard: bool = True) -> list[str]:
        plain = {
            "contract": "p", "state": "broken", "state_text": "", "since": 1, "slices": ["code"], "cells": [],
            "clauses": ["tv"], "extents": [], "growth": [], "actions": [], "diagnoses": [],
            "only_route_left": False, "went_away": False, "kernel_train": "t", "kernel_inference": "q", "headline": "",
        }  # fmt: skip
        overview = {
            "incidents": [{"id": str(number), **plain, **one} for number, one in enumerate(incidents)],
            "counts": {"p": counts}, "now": 9, "at": 9, "heard": heard, "missing": [], "in_force": [], "no_traffic": {},
        }  # fmt: skip
        contract = {"name": "p", "kernels": [{"role": "inference", "version": "q", "name": "q"}] * heard}
        given = {"overview": overview, "contracts": [contract], "promotions": [], "health": {"failures": {}}}
        return browser.evaluate(f"""import('/page/overview.js').then((page) => {{
          page.showOverview({json.dumps(given)});
          const title = document.querySelector('#overview-title');
          const badges = [...document.querySelectorAll('.incident .badge')];
          return [title.textContent, title.className, ...badges.map((one) => one.innerText)];
        }})""")

    browser.evaluate("document.querySelector('#pause').click()")  # nothing else is drawn over it
    fail, invalid = {"status": "FAIL", "on": "fail"}, {"status": "FAIL", "on": "invalid-input", "clauses": ["input"]}
    undecided = {"status": "INCONCLUSIVE", "on": "inconclusive"}
    waiting = {"status": "NO_DATA", "on": "no-data", "state_text": "Waiting for first data"}
    assert shown({"PASS": 2}) == ["Every promise holds on what is measured", "pass"]
    assert shown({"PASS": 1, "INCONCLUSIVE": 1}) == ["Nothing is known to be broken", ""]
    assert shown({"PASS": 2}, undecided)[:2] == ["Nothing is known to be broken", ""]
    assert shown({"FAIL": 1}, fail | {"slices": ["long"]}, invalid) == [
        "1 promise was broken on long", "fail", "✕ Fail", "⊘ Invalid input",
    ]  # fmt: skip
    ended = fail | {"state_text": "Ended", "slices": ["long"]}
    assert shown({"FAIL": 1}, fail, ended) == ["1 promise was broken on code", "fail", "✕ Fail", "○ Ended"]
    assert shown({"PASS": 1}, ended) == ["A run has ended", "silent", "○ Ended"]
    cell = {"clause": "tv", "slice": "code", "since": 1, "until": None}
    for held, said in (
        (True, ["1 promise was broken on code", "✕ Was broken"]),
        (False, ["1 promise is broken on code", "✕ Fail"]),
    ):
        text = "Was broken; its alert still fires" if held else "Broken"
        incident = fail | {"state": "broken", "state_text": text, "cells": [cell | {"held": held}]}
        lasting = shown({"PASS": 1}, incident)
        assert [lasting[0], *lasting[2:]] == said
        given = {"overview": {"at": 9, "now": 9, "incidents": [incident]}, "promotions": []}
        title = browser.evaluate(f"import('/page/main.js').then((page) => page.title({json.dumps(given)}))")
        assert title == f"\N{MULTIPLICATION X} {'was' if held else '1'} broken · kc-otel"
    assert shown({"INVALID_INPUT": 1}, invalid) == ["Sequences fail the input checks", "fail", "⊘ Invalid input"]
    assert shown({"NO_DATA": 1}, waiting, heard=False)[:2] == ["Waiting for the first data", "silent"]
    assert shown({"PASS": 1, "NO_DATA": 1}, waiting)[:2] == ["Nothing is known to be broken", ""]
    for state in ("unproven", "broken"):  # a route is ordered that nobody is seen to take
        away = shown({"PASS": 2}, fail | {"state": state, "went_away": True})
        said = "Nothing is known to be broken; a breach went away without proof of recovery"
        assert away == [said, "silent", "\N{EN DASH} Unproven"]
    hook = {"endpoint": "pager", "waiting": 0, "parked": 0, "disabled": ""}  # all of it was over before it was sent
    health = {"points": {}, "invalid": {}, "failures": {}, "shards": [], "series": 0, "outbox": [hook]}
    told = browser.evaluate(f"""import('/page/aside.js').then((page) => {{
      page.showHealth({{ health: {json.dumps(health)}, overview: {{ now: 9 }} }});
      return document.querySelector('#health-body div:last-child').textContent;
    }})""")
    assert told == "Webhook pagernothing waits"
    stopped = waiting | {"state_text": "No data"}
    # The kernel may report other slices.
    assert shown({"PASS": 1, "NO_DATA": 1}, stopped)[:2] == ["No data on code", "silent"]


def test_what_is_asked_and_nobody_looks_at_is_said_beside_it(browser: Any, serve: Callable[..., Evaluator]) -> None:
    """Of a directive that has been asked for long enough for a program to say that it looks at it."""
    browser.open(serve().api)
    browser.wait("document.querySelector('#decisions-body > *')")

    def shown(kind: str, since: int, heard: str) -> str:
        return browser.evaluate(f"""import('/page/aside.js').then((page) => {{
          page.showDecisions({{
            decisions: {{
              routes: [], directives: [{{ contract: 'p', kind: '{kind}', slice: 'code', since: {since} }}],
            }},
            contracts: [{{ name: 'p' }}],
            health: {{ listeners: {{ p: {{ halt: {heard} }} }} }},
            overview: {{ now: 1000 }},
          }});
          return document.querySelector('#decisions-body').innerText;
        }})""")

    said = "No program acts on this: no training loop asks whether it should stop (recorder.follow)."
    assert said in shown("halt", 800, "null")
    warning = "document.querySelector('#decisions-body .warning')"
    assert browser.evaluate(f"getComputedStyle({warning}).display") == "block"  # not laid over the line before it
    assert said in shown("halt", 800, "850")
    assert "listens" not in shown("halt", 800, "950")
    assert "listens" not in shown("halt", 950, "null")
    assert "listens" not in shown("hold-promotion", 100, "null")
    said = browser.evaluate("document.querySelector('#decisions-body').innerText")
    assert said.startswith("Promotion of this version is held because of code"), "another's is not"


def test_an_incident_has_an_address_that_a_message_can_link_to(browser: Any, broken: Evaluator) -> None:
    """Opened from its card or from the address: every slice with its onset, and what was done; an old one says so."""
    browser.open(broken.api)
    browser.wait("document.querySelector('.incident h2 a')")
    browser.evaluate("document.querySelector('.incident h2 a').focus()")
    browser.press("Enter")
    browser.wait("document.querySelector('#incident').open && document.querySelector('#incident .onsets td')")
    address = browser.evaluate("location.hash")
    said = browser.evaluate("document.querySelector('#incident').innerText")
    assert "above its limit on code" in said
    assert "Contained" in said
    assert "to the training kernel" in said
    assert browser.evaluate("document.querySelector('#incident .onsets th a').innerText") == "code"
    assert browser.evaluate(INCIDENT_FITS)
    browser.evaluate("document.querySelector('#incident .close').click()")
    browser.wait("location.hash === '#/'")
    browser.open(f"{broken.api}/{address}")
    browser.wait("document.querySelector('#incident .onsets td')")
    browser.open(f"{broken.api}/#/incident/unknown")
    browser.wait("document.querySelector('#incident .notice')")


def located(evaluator: Evaluator, operator: str = "o_proj") -> None:
    """Somebody has found out which operator it is."""
    (incident,) = httpx.get(f"{evaluator.api}/api/v1/incidents").json()["incidents"]
    found = {"kind": "locate", "text": f"culprit: layer 1, {operator}", "by": "ada", "slice": "code"}
    answer = httpx.post(
        f"{evaluator.api}/api/v1/incidents/{incident['id']}/diagnoses",
        json=found | {"evidence": located_evidence(operator)},
    )
    assert answer.status_code == 200, answer.text


def test_an_incident_shows_drift_along_depth_once_it_was_located(browser: Any, broken: Evaluator) -> None:
    """The culprit is marked, at any width; a newer answer takes the picture's place, and its names are no markup."""
    (incident,) = httpx.get(f"{broken.api}/api/v1/incidents").json()["incidents"]
    browser.open(f"{broken.api}/#/incident/{incident['id']}", width=390, height=800)
    browser.wait("document.querySelector('#incident .onsets td')")
    assert browser.evaluate("document.querySelector('#depth-chart')") is None
    located(broken)
    browser.wait("document.querySelector('#depth-chart .chart')", 20)
    assert "Marked: layer 1, o_proj." in browser.evaluate("document.querySelector('#depth-text').innerText")
    assert browser.evaluate(INCIDENT_FITS)
    located(broken, "<img src=x onerror=alert(1)>")
    browser.wait("document.querySelector('#depth-text').innerText.includes('<img src=x')", 20)
    assert browser.evaluate("document.querySelectorAll('img[src=x]').length") == 0
    assert browser.complaints() == []


def test_axe_finds_nothing_wrong_while_it_is_broken_or_nobody_answers(browser: Any, broken: Evaluator) -> None:
    """Overview, incident and cell in light and, on a phone, dark; then the same page when its evaluator is gone."""
    located(broken)
    grounds = []
    for dark, width in ((False, 1200), (True, 360)):
        browser.open(broken.api, dark=dark, width=width)
        browser.wait("document.querySelector('.incident .spark .chart')")
        grounds.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert browser.evaluate(NO_SIDEWAYS)
        incident = browser.evaluate("document.querySelector('.incident h2 a').getAttribute('href')")
        assert wrong(browser) == []
        browser.open(f"{broken.api}/{incident}", dark=dark)
        browser.wait("document.querySelector('#incident .onsets td') && document.querySelector('#depth-chart .chart')")
        assert wrong(browser) == []
        browser.open(f"{broken.api}/{cell_of(broken)}", dark=dark, width=width)
        browser.wait("document.querySelector('#history-chart .chart')")
        assert wrong(browser) == []
        assert browser.evaluate(NO_SIDEWAYS)
        assert browser.evaluate("document.querySelector('#cell').scrollWidth <= innerWidth")
    assert grounds[0] != grounds[1]
    browser.open(broken.api, dark=True)
    browser.wait(READY)
    broken.kill()
    browser.wait("document.querySelector('main.stale')")
    assert wrong(browser) == []
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    assert wrong(browser) == []


def test_a_cell_that_a_link_opens_says_what_its_fail_claims(browser: Any, broken: Evaluator) -> None:
    """Its charts come with the first answers, not with a later look; for whom, how much, since when, on what data."""
    browser.open(f"{broken.api}/{cell_of(broken)}")
    browser.wait("document.querySelector('#history-chart .chart')")
    asked = [url for url in browser.requests() if "/api/v1/overview" in url]
    assert len(asked) <= 2
    said = browser.evaluate("document.querySelector('#cell-now').innerText")
    assert f"For code on vllm 2 int8 ({BAD.fingerprint}), the mean of tv_token is at least" in said
    assert "more than the 0.02 that the contract allows, from " in said
    assert "samples of the last 1 min. Fail since" in said
    assert "ends when newer observations pass, or when no evidence is left" in said
    browser.wait("document.querySelector('#cell-kernels td')")
    assert MARKUP in browser.evaluate("document.querySelector('#cell-kernels').innerText"), "as the sender wrote it"
    assert browser.evaluate("document.querySelectorAll('img[src=x]').length") == 0
    assert browser.evaluate("document.title") != "broken-in"


def test_the_worst_of_a_failing_cell_are_one_click_away(browser, serve, recorder, contract_file, tmp_path):
    """Prompt, completion and the token that differs most, as text whatever it says; nothing is fetched unasked."""
    path, logprobs = tmp_path / "worst.sqlite", np.full(3, -3.0, dtype=np.float32)
    asked = SampledRequest("r-1", np.arange(2), np.arange(3), logprobs, BAD, attributes={"task": "code"})
    kept = WorstSequences(path, kc_otel.load_contract(contract_file), text=lambda ids: f"{MARKUP}{len(ids)}")
    kept.add([asked], [logprobs - np.array([0.0, 2.5, 0.0])], time.time())
    kept.close()
    evaluator = breached(lambda: serve("--worst", str(path)), recorder)
    browser.open(f"{evaluator.api}/{cell_of(evaluator)}")
    browser.wait("document.querySelector('#history-chart .chart')")
    assert not [url for url in browser.requests() if "/api/v1/worst" in url]
    browser.evaluate("document.querySelector('#cell-worst > summary').click()")
    browser.wait("document.querySelector('ol.worst li')")
    said = browser.evaluate("document.querySelector('#cell-worst').innerText")
    assert "in request r-1" in said
    assert f"{MARKUP}2" in said
    assert f"most drift at token 2, “{MARKUP}1”, log P/Q -2.5 nats" in said
    assert browser.evaluate("document.querySelectorAll('#cell-worst img').length") == 0
    assert browser.evaluate("document.querySelector('#cell-worst mark.drift-3').innerText") == f"{MARKUP}1"
    assert browser.evaluate("document.title") != "broken-in"
    assert browser.evaluate(NO_SIDEWAYS)


def test_a_change_is_announced_and_a_pause_is_kept(browser, serve, recorder):
    """A screen reader hears of a new verdict once; a paused page stands still."""
    evaluator = serve()
    traffic = recorder(evaluator)
    traffic.send(**CALM)
    browser.open(evaluator.api)
    browser.wait("document.querySelector('.mark.pass')")
    browser.evaluate("Object.defineProperty(document, 'hidden', { value: true })")  # behind others
    time.sleep(2.0)  # a look that was due already
    for _ in range(10):
        traffic.send(code=0.3, prose=0.005)
        time.sleep(0.2)
    browser.wait("document.querySelector('#announce').textContent.includes('token-tv on code: Fail')")
    browser.evaluate("document.querySelector('#pause').click()")
    browser.wait("document.querySelector('#live-text').textContent.startsWith('Paused')")
    before = browser.evaluate("document.querySelector('#live-text').textContent")
    time.sleep(2.5)
    assert browser.evaluate("document.querySelector('#live-text').textContent") == before
    assert browser.evaluate("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"


def test_a_lost_evaluator_is_said_and_found_again_with_its_past(browser, serve, broken):
    """Nothing old is passed off as new; after a crash the page goes on by itself, and the past is there."""
    port = broken.api.rsplit(":", 1)[1]
    browser.open(broken.api)
    browser.wait("document.querySelector('.incident .actions-taken')")
    since = browser.evaluate("document.querySelector('.incident time').dateTime")
    broken.kill()
    browser.wait("document.querySelector('main.stale')")
    assert "The evaluator has not answered since" in browser.evaluate("document.querySelector('#notices').innerText")
    assert browser.evaluate("document.querySelector('#live-text').textContent") == "No answer"
    assert browser.evaluate("document.querySelector('#overview-title').textContent") == "No evaluator answers"
    assert browser.evaluate("document.title").startswith("! no answer")
    browser.evaluate("document.querySelector('#query').dispatchEvent(new Event('input'))")
    assert browser.evaluate("document.querySelector('#overview-title').textContent") == "No evaluator answers"
    serve("--api-port", port)
    browser.wait("!document.querySelector('main.stale')", 40.0)
    assert browser.evaluate("document.querySelector('#notices').innerText") == ""
    said = browser.evaluate("document.querySelector('#announce').textContent")
    assert said.startswith("The evaluator answers again.")
    browser.wait("document.querySelector('.incident .actions-taken')")
    assert browser.evaluate("document.querySelector('.incident time').dateTime") == since


def test_what_people_decided_and_where_a_version_is_are_on_the_page(browser: Any, broken: Evaluator) -> None:
    """A pin, a silence, an acknowledgement and a promotion, in words, with who and what ends it."""
    for arguments in (
        ("route", "pin", "policy", "train-kernel", "--slice", "prose", "--for", "1h"),
        ("alerts", "silence", "policy", "--slice", "prose", "--for", "1h"),
        ("alerts", "ack", "policy", "--slice", "code"),
        ("promote", "policy", BAD.fingerprint, "--start"),
    ):
        why = () if arguments[0] == "promote" else ("--why", "a drill")
        done = command(*arguments, *why, "--by", "ada", "--url", broken.api)
        assert done.returncode == 0, done.stderr
    browser.open(broken.api)
    browser.wait("document.querySelector('#promotions:not([hidden]) li') && document.querySelector('#in-force li')")
    said = browser.evaluate("document.querySelector('main').innerText")
    assert "prose is pinned to the training kernel by ada (a drill)" in said
    assert "kc-otel route unpin policy --slice prose" in said
    assert "every clause on slice prose is silenced by ada (a drill)" in said
    assert "ada acknowledged token-tv on code: a drill" in said
    assert f"vllm 2 int8 ({BAD.fingerprint}) is in offline-ci" in said
    of_replaced = "[{ contract: 'p', kernel: 'v', status: 'replaced', position: 'full' }]"
    asked = f"stage({{ contract: 'p', kernel_inference: 'v' }}, {of_replaced})"
    told = browser.evaluate(f"import('/page/overview.js').then(({{ stage }}) => {asked})")
    assert told == "replaced", "in full is the version that has its place"
    none = "{ decisions: { routes: [], directives: [] }, contracts: [] }"
    said = browser.evaluate(f"""import('/page/aside.js').then(({{ showDecisions }}) => {{
      showDecisions({none});
      return document.querySelector('#decisions-body').innerText;
    }})""")
    assert said == "No route is in force, and the policy asks for nothing.", "a person may hold a promotion, or pin"
    assert browser.evaluate("document.querySelector('#events').innerText").count("ada") >= 4
    assert browser.complaints() == []


def test_with_no_data_it_says_what_to_do_next(browser: Any, serve: Callable[..., Evaluator]) -> None:
    """Nothing is called broken; the endpoint and the lines of code are there."""
    evaluator = serve()
    browser.open(evaluator.api, width=360, height=740)
    browser.wait("document.querySelector('#empty pre')")
    said = browser.evaluate("document.querySelector('main').innerText")
    assert "Waiting for the first data" in said
    assert f"OTEL_EXPORTER_OTLP_ENDPOINT={evaluator.http}\n" in said
    assert browser.evaluate("document.querySelectorAll('.incident').length") == 0
    assert browser.evaluate(NO_SIDEWAYS)
    assert browser.complaints() == []
    for dark in (True, False):
        browser.open(evaluator.api, dark=dark)
        browser.wait("document.querySelector('#empty .next')")
        assert wrong(browser) == []


def test_input_that_cannot_be_measured_is_no_broken_promise(browser, contract_file, serve, recorder):
    """What arrived is said with what to change, in place of how to send the first data."""
    contract_file.write_text(contract_file.read_text() + "  - {on: invalid-input, do: [notify]}\n")
    evaluator, rng = serve(), np.random.default_rng(0)
    train, inference = logprobs(rng, 8, 128, 0.001)
    sender = recorder(evaluator).recorder
    sender.compare(0.7 * train, inference, attributes={"task": "code"})
    sender.force_flush()
    browser.open(evaluator.api)
    browser.wait("document.querySelector('.incident')")
    said = browser.evaluate("document.querySelector('main').innerText")
    assert browser.evaluate("document.querySelector('#overview-title').innerText") == "Sequences fail the input checks"
    assert "8 temperature_mismatch" in said
    assert "Divide the training logits by the sampling temperature" in said
    assert "promise" not in said.split("Every promise")[0]
    assert browser.evaluate("document.querySelector('#empty').innerText") == ""
    assert browser.complaints() == []


def test_two_hundred_slices_are_quick_and_can_be_searched(browser, serve, contract_file):
    """The first rows at once, the rest on demand, a filter by name, and no chart before it is asked for."""
    slices = "".join(f"  tenant-{index:03d}: {{where: {{tenant: t{index}}}}}\n" for index in range(200))
    text = CONTRACT.replace("  code: {where: {task: code}}\n  prose: {where: {task: prose}}\n", slices)
    contract_file.write_text(text)
    evaluator = serve("--tick", "1")
    browser.open(evaluator.api)
    browser.wait("document.querySelectorAll('.rows > .grid-row').length === 40")
    browser.evaluate("document.querySelector('[data-more]').click()")
    assert browser.evaluate("document.querySelectorAll('.rows > .grid-row').length") == 201
    spent = browser.evaluate(
        "(() => { const started = performance.now(); const query = document.querySelector('#query');"
        " query.value = 'tenant-17'; query.dispatchEvent(new Event('input')); return performance.now() - started; })()"
    )
    assert spent < 1000
    assert browser.evaluate("document.querySelectorAll('.rows > .grid-row').length") == 10
    assert browser.evaluate("document.querySelector('#shown').textContent") == "10 of 201 slices match."
    assert not [url for url in browser.requests() if "/history?" in url]
    assert browser.complaints() == []
    assert wrong(browser) == []
    browser.open(evaluator.api, dark=True)
    browser.wait("document.querySelectorAll('.rows > .grid-row').length === 40")
    assert wrong(browser) == []


def test_what_is_not_of_now_is_not_green(browser, serve, recorder, tmp_path):
    """The evaluator answers and judges nothing any more: headline, title, dot and notice say so, and since when."""
    evaluator = serve()
    recorder(evaluator).send(**CALM)
    browser.open(evaluator.api)
    title = "document.querySelector('#overview-title')?.textContent"
    browser.wait(f"{title} === 'Every promise holds on what is measured'")
    browser.evaluate("""(() => {
      const real = window.fetch;
      window.fetch = async (...asked) => {
        const answer = await real(...asked);
        const overview = String(asked[0]).includes('/overview');
        if (!answer.ok || !(overview || String(asked[0]).includes('/health'))) return answer;
        const said = await answer.json();
        if (overview) said.at = said.now - 75;
        else said.failures = { '': 'the state cannot be written' };
        return new Response(JSON.stringify(said));
      };
    })()""")
    browser.wait(f"{title} === 'Nothing has been evaluated for 1 min 15 s'")
    assert browser.evaluate("document.querySelector('#overview-title').className") == "fail"
    said = browser.evaluate("document.querySelector('#overview-sub').textContent")
    assert re.match(r"At \d.*: Nothing is known to be broken; the evaluator fails\. ", said)
    assert browser.evaluate("document.querySelector('#live-dot').className") == "dot lost"
    assert browser.evaluate("document.title") == "! nothing is judged · kc-otel"
    never = "import('/page/format.js').then((page) => page.lateness({{at: null, now: 1000, started_at: {}}}))"
    assert [browser.evaluate(never.format(since)) for since in (960, 980)] == [40, 0]
    notice = browser.evaluate("document.querySelector('#notices').textContent")
    assert "this page is out of date; all contracts: the state cannot be written" in notice
    browser.screenshot(tmp_path / "late.png")
    assert (tmp_path / "late.png").stat().st_size


def test_the_tab_of_a_contract_is_no_greener_than_its_headline(browser, serve, recorder):
    """A version that was measured after its rollback, or points that nothing judges, are no PASS of the contract."""
    evaluator = serve()
    recorder(evaluator).send(**CALM)
    browser.open(evaluator.api)
    mark = "document.querySelector('#contracts .shape')?.ariaLabel"
    browser.wait(f"{mark} === 'Pass'")
    stray = {
        "contract": "policy", "kernel": "v2", "status": "rolled-back", "stage": "offline-ci", "position": "offline-ci",
        "entered": 1, "seen_serving": 2, "missing": [], "hold": None, "elsewhere": "", "reason": "",
    }  # fmt: skip
    lost = {"contract": "policy", "outcome": "late", "since": 1, "text": "", "kernel_train": "", "kernel_inference": ""}
    for path, key, row in (("/overview", "missing", lost), ("/promotions", "promotions", stray)):
        browser.evaluate(f"""(() => {{
          const real = window.fetch;
          window.fetch = async (...asked) => {{
            const answer = await real(...asked);
            if (!String(asked[0]).includes('{path}')) return answer;
            return new Response(JSON.stringify({{ ...await answer.json(), {key}: [{json.dumps(row)}] }}));
          }};
        }})()""")
        browser.wait(f"{mark} === '{'Not all judged' if row is lost else 'Measured after its rollback'}'")
    assert "measured after its rollback" in browser.evaluate("document.title")
    assert browser.evaluate("document.querySelector('#overview-title').textContent").endswith("after its rollback")


def test_a_browser_asks_for_a_token_once(browser: Any, serve: Callable[..., Evaluator], tmp_path: Path) -> None:
    """As the password; it is there for what the page reads and says. A link from elsewhere leads to the page."""
    access_of(tmp_path, ada="read act")
    evaluator = serve("--access", str(tmp_path / "access.yaml"))
    browser.open("about:blank")
    browser.call("Fetch.enable", handleAuthRequests=True)
    browser.evaluate(f"void setTimeout(() => {{ location = '{evaluator.api}/' }})")
    asked, seen = [], 0
    while not asked or seen < len(browser.events):
        browser.call("Page.getNavigationHistory")  # the page itself answers nothing while it is left
        for event in browser.events[seen:]:
            if event["method"] == "Fetch.requestPaused":
                browser.call("Fetch.continueRequest", requestId=event["params"]["requestId"])
            elif event["method"] == "Fetch.authRequired":
                asked.append(event["params"]["authChallenge"])
                answer = {"response": "ProvideCredentials", "username": "", "password": token_of("ada")}
                browser.call(
                    "Fetch.continueWithAuth", requestId=event["params"]["requestId"], authChallengeResponse=answer
                )
            seen += 1
    browser.call("Fetch.disable")
    assert [challenge["scheme"] for challenge in asked] == ["basic"]
    browser.wait(READY)
    pin = {"contract": "policy", "slice": "code", "kernel": "train-kernel", "by": "ada", "why": "a test"}
    posted = f"""fetch('/api/v1/decisions/pin', {{method: 'POST', body: '{json.dumps(pin)}',
      headers: {{'content-type': 'application/json'}}}}).then((answer) => answer.status)"""
    assert browser.evaluate(posted) == 200
    browser.wait("document.querySelector('main').innerText.includes('pinned to the training kernel by ada')")
