// One cell in full: why its verdict is what it is, its past against the limit, and what was observed.

import { byId, el, fill } from "./dom.js";
import { eventLine, grouped } from "./events.js";
import { drawDistribution, drawHistory, forget } from "./charts.js";
import { STATES, address, clock, count, iso, number, place, span } from "./format.js";

const EVENTS = 500;
const SHOWN_EVENTS = 12;
const REFRESH = 5000;

let open = null;

const query = (values) => new URLSearchParams(values).toString();

export function openCell(state, parts, closed) {
  const [contract, clause, slice, train = "", inference = ""] = parts;
  closeCell();
  const dialog = byId("cell");
  open = { contract, clause, slice, train, inference, drawn: 0 };
  fill(dialog,
    el("div", { class: "cell-head" },
      el("div", {}, el("p", { class: "quiet", id: "cell-of" }, contract), el("h2", { id: "cell-title", tabindex: "-1" }, `${clause} on ${place(slice)}`)),
      el("button", { type: "button", class: "close", "aria-label": "Close", on: { click: () => dialog.close() } }, "✕")),
    el("div", { id: "cell-now" }),
    figure("history", "Over time"),
    figure("distribution", "What was observed"),
    el("section", { "aria-labelledby": "cell-kernels-title" }, el("h3", { id: "cell-kernels-title" }, "Kernels"), el("div", { id: "cell-kernels" })),
    el("section", { "aria-labelledby": "cell-events-title" }, el("h3", { id: "cell-events-title" }, "What happened here"), el("ol", { id: "cell-events", class: "events" })));
  dialog.onclose = () => { forget(); open = null; closed(); };
  dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); };
  dialog.showModal();
  byId("cell-title").focus();
  refreshCell(state);
}

export function closeCell() {
  const dialog = byId("cell");
  if (!dialog.open) return;
  dialog.onclose = null;
  forget();
  open = null;
  dialog.close();
}

function figure(name, title) {
  return el("figure", { class: "chart", "aria-labelledby": `${name}-title` },
    el("h3", { id: `${name}-title` }, title),
    el("p", { id: `${name}-key`, class: "key", "aria-hidden": "true" }),
    el("div", { id: `${name}-chart`, class: "plot", role: "img", "aria-labelledby": `${name}-title ${name}-text` }),
    el("figcaption", { id: `${name}-text`, class: "quiet" }, "Loading"),
    el("details", {}, el("summary", {}, "As a table"), el("div", { id: `${name}-table`, class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, as a table` })));
}

/** Show the cell's newest verdict; its charts every few seconds. */
export async function refreshCell(state) {
  const mine = open;
  if (!mine || !state.overview) return;
  const contract = state.contracts.find((one) => one.name === mine.contract);
  const found = state.cells.filter(({ verdict: v }) => v.contract === mine.contract && v.clause === mine.clause && v.slice === mine.slice);
  const cell = found.find(({ verdict: v }) => v.kernel_train === mine.train && v.kernel_inference === mine.inference) ?? (mine.inference ? null : found[0]);
  const clause = contract?.clauses.find((one) => one.id === mine.clause);
  if (!contract || !clause) {
    fill(byId("cell-now"), el("p", { class: "notice" }, "There is no such cell: the contract or the clause is not loaded here."));
    return;
  }
  showNow(cell, found, contract, clause, state.overview.now);
  if (performance.now() - mine.drawn < REFRESH) return;
  mine.drawn = performance.now();
  const at = { contract: mine.contract, clause: mine.clause };
  const kernels = { kernel_train: cell?.verdict.kernel_train ?? mine.train, kernel_inference: cell?.verdict.kernel_inference ?? mine.inference };
  try {
    const [history, own, whole, events] = await Promise.all([
      fetchJson(`/api/v1/history?${query({ ...at, slice: mine.slice })}`),
      fetchJson(`/api/v1/distribution?${query({ ...at, slice: mine.slice, ...kernels })}`),
      mine.slice === "all" ? null : fetchJson(`/api/v1/distribution?${query({ ...at, slice: "all", ...kernels })}`),
      fetchJson(`/api/v1/events?${query({ contract: mine.contract, newest: EVENTS })}`),
    ]);
    if (open !== mine) return;
    showKernels(contract, kernels);
    showCellEvents(events.events, mine);
    await Promise.all([
      drawHistory(history, { ...kernels, clause, unit: clause.unit, since: cell?.since }),
      drawDistribution(own, whole, place(mine.slice)),
    ]);
  } catch (error) {
    console.warn(error.message);
    for (const id of ["history-text", "distribution-text"]) if (byId(id)?.textContent === "Loading") byId(id).textContent = "No answer from the evaluator. Trying again.";
  }
}

async function fetchJson(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}

function showNow(cell, found, contract, clause, now) {
  if (!cell) {
    fill(byId("cell-now"),
      el("p", { class: "notice" }, "This pair of kernel versions is no longer judged: another one has taken its place."),
      el("ul", { class: "chips" }, found.map(({ verdict }) => el("li", {}, el("a", { href: address(verdict) }, `kernel ${verdict.kernel_inference || "not seen yet"}`)))));
    return;
  }
  const verdict = cell.verdict;
  const { shape, word, tone } = STATES[verdict.status];
  const unit = clause.unit === "1" ? "" : ` ${clause.unit.replace(/[{}]/g, "")}`;
  const window = { short: contract.window, long: contract.long_window }[verdict.window];
  const level = `${Number((contract.confidence * 100).toPrecision(4))} %`;
  const rows = [
    ["Estimate", `${number(verdict.estimate)}${verdict.estimate === null ? "" : unit}`],
    [`${level} confidence interval`, verdict.lower === null && verdict.upper === null ? "–" : `${number(verdict.lower)} to ${verdict.upper === null ? "unbounded" : number(verdict.upper)}`],
    ["Limit", `${number(verdict.limit)}${unit}`],
    ["Margin", verdict.margin === null ? "–" : `${number(verdict.margin)}${verdict.margin < 0 ? " (over)" : ""}`],
    ["Samples", `${count(verdict.samples)}${window ? ` in ${span(window, 2)} (${verdict.window} window)` : ""}`],
    ["Method", verdict.method || "–"],
    ["Since", el("span", {}, el("time", { datetime: iso(cell.since) }, clock(cell.since)), ` · ${span(now - cell.since, 2)}`)],
    ["Alerts", cell.firing.length ? `firing: ${cell.firing.join(", ")}` : "none"],
  ];
  fill(byId("cell-now"),
    el("p", { class: "verdict" }, el("span", { class: `badge ${tone}` }, el("span", { "aria-hidden": "true" }, `${shape} `), word), " ", verdict.reason),
    el("p", { class: "quiet" }, clause.meaning),
    el("dl", { class: "numbers" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
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
