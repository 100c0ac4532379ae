// One cell in full: why its verdict is what it is, and its past against the limit.

import { twoCauses } from "./causes.js";
import { byId, el, fill } from "./dom.js";
import { eventLine, grouped } from "./events.js";
import { figure, showChart } from "./charts.js";
import { evidenceChart, historyChart, marksOf, pastOf } from "./past.js";
import { worstSequences } from "./worst.js";
import { STATES, address, clock, count, iso, kernel, number, place, span, stateOf } from "./format.js";

const EVENTS = 500;
const SHOWN_EVENTS = 12;
const REFRESH = 5000; // milliseconds
const PERIODS = [24, 6, 1]; // long windows
const AXES = ["time", "step"];

let open = null;

const query = (values) => new URLSearchParams(values).toString();

export function openCell(state, parts, closed) {
  const [contract, clause, slice, train = "", inference = ""] = parts;
  closeCell();
  const dialog = byId("cell");
  open = { contract, clause, slice, train, inference, drawn: -Infinity, period: PERIODS[0], over: AXES[0] };
  fill(dialog,
    el("div", { class: "cell-head" },
      el("div", {}, el("p", { class: "quiet", id: "cell-of" }, contract), el("h2", { id: "cell-title", tabindex: "-1" }, `${clause} on ${place(slice)}`)),
      el("button", { type: "button", class: "close", "aria-label": "Close", on: { click: () => dialog.close() } }, "✕")),
    el("div", { id: "cell-now" }),
    figure("history", "History", el("span", { id: "axes", class: "periods", role: "group", "aria-label": "From left to right", hidden: true }), el("span", { id: "periods", class: "periods", role: "group", "aria-label": "Period" })),
    figure("evidence", "Evidence that the limit is broken"),
    worstSequences(() => ({ contract, clause, slice, kernel_inference: open?.now ?? inference })),
    el("section", { "aria-labelledby": "cell-kernels-title" }, el("h3", { id: "cell-kernels-title" }, "Kernels"), el("div", { id: "cell-kernels" })),
    el("section", { "aria-labelledby": "cell-events-title" }, el("h3", { id: "cell-events-title" }, "What happened here"), el("ol", { id: "cell-events", class: "events" })));
  dialog.onclose = () => { open = null; closed(); };
  dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); };
  dialog.showModal();
  byId("cell-title").focus();
  refreshCell(state);
}

export function closeCell() {
  const dialog = byId("cell");
  if (!dialog.open) return;
  dialog.onclose = null;
  open = null;
  dialog.close();
}

/** Show the cell's newest verdict; its charts every few seconds. */
export async function refreshCell(state) {
  const mine = open;
  if (!mine || !state.overview) return;
  const contract = state.contracts.find((one) => one.name === mine.contract);
  const found = state.cells.filter((v) => v.contract === mine.contract && v.clause === mine.clause && v.slice === mine.slice);
  const cell = found.find((v) => v.kernel_train === mine.train && v.kernel_inference === mine.inference) ?? (mine.inference ? null : found[0]);
  const clause = contract?.clauses.find((one) => one.id === mine.clause);
  if (!contract || !clause) {
    fill(byId("cell-now"), el("p", { class: "notice" }, "There is no such cell: the contract or the clause is not loaded here."));
    return;
  }
  showNow(cell, found, contract, clause, state.overview.now);
  showPeriods(contract, mine, state);
  if (performance.now() - mine.drawn < REFRESH) return;
  mine.drawn = performance.now();
  mine.now = cell?.kernel_inference;
  const kernels = { kernel_train: cell?.kernel_train ?? mine.train, kernel_inference: cell?.kernel_inference ?? mine.inference };
  try {
    const period = { contract: mine.contract, clause: mine.clause, slice: mine.slice, from: state.overview.now - mine.period * contract.long_window };
    const [history, events] = await Promise.all([
      fetchJson(`/api/v1/history?${query(period)}`),
      fetchJson(`/api/v1/events?${query({ contract: mine.contract, newest: EVENTS })}`),
    ]);
    if (open !== mine) return;
    showKernels(contract, kernels);
    showCellEvents(events.events, mine);
    const past = pastOf(history, kernels, mine.over);
    const over = mine.over === "step" ? "steps" : "time";
    showAxes(mine, state, history);
    showChart("history", historyChart(past, { title: `${mine.clause} on ${place(mine.slice)} over ${over}`, unit: clause.unit === "1" ? "" : clause.unit.replace(/[{}]/g, ""), events: marksOf(events.events, mine) }), "No evaluation is stored for this period.");
    showChart("evidence", evidenceChart(past, `Evidence against ${mine.clause} on ${place(mine.slice)} over ${over}`), "There is no evidence against this limit: the verdict says why.");
  } catch (error) {
    console.warn(error.message);
    for (const id of ["history-text", "evidence-text"]) if (byId(id)?.textContent === "Loading") byId(id).textContent = "The evaluator does not answer. Retrying.";
  }
}

function showPeriods(contract, mine, state) {
  choices("periods", PERIODS, mine, "period", state, (many) => span(many * contract.long_window, 2));
}

/** Where the trainer tells its steps, the past can be drawn over them. */
function showAxes(mine, state, history) {
  byId("axes").hidden = mine.over === "time" && !history.series.some((one) => one.points.some((point) => point.at(-1) !== null));
  choices("axes", AXES, mine, "over", state, (axis) => `by ${axis}`);
}

function choices(id, values, mine, name, state, text) {
  const chosen = (value) => ({ click: () => { Object.assign(mine, { [name]: value, drawn: -Infinity }); refreshCell(state); } });
  if (!byId(id).children.length) fill(byId(id), values.map((value) => el("button", { type: "button", on: chosen(value) }, text(value))));
  values.forEach((value, index) => byId(id).children[index].setAttribute("aria-pressed", String(value === mine[name])));
}

async function fetchJson(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}

function showNow(verdict, found, contract, clause, now) {
  if (!verdict) {
    fill(byId("cell-now"),
      el("p", { class: "notice" }, "This pair of kernel versions is no longer judged: another one has taken its place."),
      el("ul", { class: "chips" }, found.map((verdict) => el("li", {}, el("a", { href: address(verdict) }, `kernel ${verdict.kernel_inference || "not seen yet"}`)))));
    return;
  }
  const { shape, word, tone } = stateOf(verdict);
  const unit = clause.unit === "1" ? "" : ` ${clause.unit.replace(/[{}]/g, "")}`;
  const window = { short: contract.window, long: contract.long_window }[verdict.window];
  const level = `${Number((contract.confidence * 100).toPrecision(4))} %`;
  const rows = [
    ["Estimate", `${number(verdict.estimate)}${verdict.estimate === null ? "" : unit}`],
    [`${level} confidence interval`, verdict.lower === null && verdict.upper === null ? "–" : `${number(verdict.lower)} to ${verdict.upper === null ? "unbounded" : number(verdict.upper)}`],
    ["Limit", `${number(verdict.limit)}${unit}`],
    verdict.status === "FAIL" && verdict.margin < 0 ? ["Over the limit by at least", number(-verdict.margin)] : ["Margin", number(verdict.margin)],
    ["Evidence that it is broken", verdict.evidence === null ? "–" : `${Math.floor(100 * verdict.evidence)} % of an alarm${verdict.status === "FAIL" && verdict.evidence < 1 ? " now, 100 % before" : ""}`],
    ["Samples", `${count(verdict.samples)}${window ? ` in ${span(window, 2)} (${verdict.window} window)` : ""}`],
    ["Method", verdict.method || "–"],
    ["Covers", { population: "future traffic, too", traffic: "only the measured traffic" }[verdict.about]],
    ["Since", el("span", {}, el("time", { datetime: iso(verdict.since) }, clock(verdict.since)), ` · ${span(now - verdict.since, 2)}`)],
    ["Alerts", verdict.firing.length ? `firing: ${verdict.firing.join(", ")}` : "none"],
  ];
  fill(byId("cell-now"),
    el("p", { class: "verdict" }, el("span", { class: `badge ${tone}` }, el("span", { "aria-hidden": "true" }, `${shape} `), word), " ", verdict.reason),
    claim(verdict, contract, clause, window),
    el("p", { class: "quiet" }, clause.meaning),
    el("dl", { class: "numbers" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    twoCauses(verdict.causes),
    el("p", { class: "quiet" }, contract.claims.join(" ")));
}

/** What a verdict claims, for whom, how sure, since when and on what data, for a reader who has never seen one. */
function claim(verdict, contract, clause, window) {
  if (!window) return null;
  const [limit, lower, upper] = [verdict.limit, verdict.lower, verdict.upper].map(number);
  const sure = `at ${Number((contract.confidence * 100).toPrecision(4))} % confidence`;
  const found = {
    FAIL: verdict.lower > verdict.limit ? `is at least ${lower} ${sure}, more than the ${limit} that the contract allows` : `was more than the ${limit} that the contract allows, and nothing shows yet that this has ended`,
    PASS: verdict.upper <= verdict.limit ? `is at most ${upper} ${sure}, within the ${limit} that the contract allows` : `has not exceeded the limit so far`,
    INCONCLUSIVE: `lies between ${lower} and ${verdict.upper === null ? "no known bound" : upper} ${sure}: more data are needed to decide against the limit of ${limit}`,
  }[verdict.status];
  const ends = " It began when the evidence reached an alarm. It ends when newer observations pass, or when no evidence is left.";
  return el("p", {},
    `For ${place(verdict.slice)} on ${kernel(contract, "inference", verdict.kernel_inference)}, the ${clause.statistic} of ${clause.metric} ${found}, from ${count(verdict.samples)} samples of the last ${span(window, 2)}. ${STATES[verdict.status].word} since `,
    el("time", { datetime: iso(verdict.since) }, clock(verdict.since)), ".", verdict.status === "FAIL" ? ends : "");
}

function showKernels(contract, { kernel_train, kernel_inference }) {
  const fields = (role, version) => contract.kernels.find((one) => one.role === role && one.version === version)?.fields ?? {};
  const [train, inference] = [fields("train", kernel_train), fields("inference", kernel_inference)];
  const names = [...new Set([...Object.keys(train), ...Object.keys(inference)])].filter((name) => name !== "role").sort();
  fill(byId("cell-kernels"), el("table", { class: "kernels" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Field"), el("th", { scope: "col" }, "Training"), el("th", { scope: "col" }, "Inference"))),
    el("tbody", {},
      el("tr", {}, el("th", { scope: "row" }, "version"), el("td", {}, el("code", {}, kernel_train || "not seen yet")), el("td", {}, el("code", {}, kernel_inference || "not seen yet"))),
      names.map((name) => el("tr", { class: train[name] === inference[name] ? "" : "differs" },
        el("th", { scope: "row" }, name, train[name] === inference[name] ? null : el("span", { class: "hidden" }, " (differs)")),
        el("td", {}, train[name] ?? "–"), el("td", {}, inference[name] ?? "–"))))));
}

function showCellEvents(events, { clause, slice }) {
  const mine = events.filter(({ data, kind }) => (data.clause === clause && data.slice === slice) || (kind !== "verdict" && kind !== "promotion" && data.by && [undefined, null, slice].includes(data.slice) && [undefined, null, clause].includes(data.clause)));
  fill(byId("cell-events"), mine.length
    ? grouped(mine.reverse()).slice(0, SHOWN_EVENTS).map((members) => eventLine(members, false))
    : el("li", { class: "quiet" }, "Nothing yet."));
}
