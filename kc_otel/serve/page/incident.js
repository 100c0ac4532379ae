// One incident in full, while it lasts and after: the address that a message links to.

import { figure, showChart } from "./charts.js";
import { byId, el, fill } from "./dom.js";
import { depthChart } from "./pictures.js";
import { address, clock, count, iso, kernel, listed, number, place, span } from "./format.js";
import { actionsTaken, badge, diagnoses, grown, ordered } from "./overview.js";

const REFRESH = 5000; // milliseconds

let open = null;

export function openIncident(state, id, closed) {
  const dialog = byId("incident");
  if (open?.id === id) return undefined;
  open = { id, asked: -Infinity };
  fill(dialog,
    el("div", { class: "cell-head" },
      el("div", {}, el("p", { class: "quiet", id: "incident-of" }, `incident ${id}`), el("h2", { id: "incident-title", tabindex: "-1" }, "Loading")),
      el("button", { type: "button", class: "close", "aria-label": "Close", on: { click: () => dialog.close() } }, "✕")),
    el("div", { id: "incident-body" }));
  dialog.onclose = () => { open = null; closed(); };
  dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); };
  if (!dialog.open) dialog.showModal(); // not closed and opened: the event of closing comes later, and would close it
  byId("incident-title").focus();
  return refreshIncident(state);
}

export function closeIncident() {
  const dialog = byId("incident");
  if (!dialog.open) return;
  dialog.onclose = null;
  open = null;
  dialog.close();
}

/** Ask for the open incident again, every few seconds. */
export async function refreshIncident(state) {
  const mine = open;
  if (!mine || !state.overview || performance.now() - mine.asked < REFRESH) return;
  mine.asked = performance.now();
  const response = await fetch(`/api/v1/incidents/${encodeURIComponent(mine.id)}`);
  const found = response.ok ? await response.json() : null;
  if (open !== mine) return;
  if (found) return show(found, state);
  byId("incident-title").textContent = "There is no such incident";
  fill(byId("incident-body"), el("p", { class: "notice" }, "The address is wrong, or the incident is too old to be stored."));
}

function show(one, state) {
  const contract = state.contracts.find((each) => each.name === one.contract);
  const { shape, word, tone } = badge(one);
  const now = state.overview?.now ?? Date.now() / 1000;
  byId("incident-of").textContent = `${one.contract} · incident ${one.id}`;
  byId("incident-title").textContent = one.headline;
  const slices = new Set(one.cells.map((cell) => cell.slice)).size;
  const facts = [
    ["Since", el("time", { datetime: iso(one.since) }, clock(one.since)), ` · ${span((one.until ?? now) - one.since, 2)}`],
    one.contained && one.state === "contained" && ["Contained", el("time", { datetime: iso(one.contained) }, clock(one.contained)), " · not measured since"],
    ordered(one) && ["State", one.state_text],
    one.until && ["Until", el("time", { datetime: iso(one.until) }, clock(one.until))],
    one.growth.length > 1 && ["It grew", grown(one)],
    ["On kernel", kernel(contract, "inference", one.kernel_inference), el("span", { class: "quiet" }, ` against ${kernel(contract, "train", one.kernel_train)}`)],
    one.diagnoses.length > 0 && ["What was found", diagnoses(one)],
    one.status === "FAIL" && !one.diagnoses.length && ["Which operator", el("code", {}, `kc-otel locate run CONTRACT --incident ${one.id} --url ${location.origin} --train … --infer … --sequences …`)],
    ["What was done", actionsTaken(one)],
  ].filter(Boolean);
  fill(byId("incident-body"),
    el("p", { class: "verdict" }, el("span", { class: `badge ${tone}` }, el("span", { "aria-hidden": "true" }, `${shape} `), word)),
    el("ul", { class: "extents" }, one.extents.map(([clause, text]) => el("li", {}, el("strong", {}, clause), " ", text))),
    one.status === "FAIL" && contract ? el("p", { class: "quiet", id: "incident-claims" }, claims(one, contract).join(" ")) : null,
    el("dl", { class: "facts" }, facts.map(([name, ...value]) => el("div", {}, el("dt", {}, name), el("dd", {}, ...value)))),
    depth(one),
    el("h3", {}, `Where, and since when: ${slices === 1 ? "1 slice" : `${count(slices)} slices`}`),
    onsets(one));
}

/** The picture of what was located last, from its evidence; nothing where the evidence has none. */
function depth(one) {
  const located = one.diagnoses.findLast((each) => each.kind === "locate");
  if (!located) return null;
  if (open.depth?.evidence === located.evidence) return open.depth.place;
  const place = el("div", { hidden: true }, figure("depth", "Drift along depth"));
  open.depth = { evidence: located.evidence, place };
  drawDepth(one.id, located.evidence, place, open);
  return place;
}

async function drawDepth(id, evidence, place, mine) {
  const response = await fetch(`/api/v1/incidents/${encodeURIComponent(id)}/diagnoses/${evidence}`);
  const found = response.ok ? await response.json() : null;
  if (open !== mine || mine.depth.place !== place) return;
  try {
    const chart = depthChart(found);
    place.hidden = false;
    showChart("depth", chart, "");
  } catch {
    place.hidden = true; // another program's evidence has another shape
  }
}

/** What a FAIL says, of which traffic, and how rarely it is wrong. */
function claims(one, contract) {
  const clauses = contract.clauses.filter((clause) => one.clauses.includes(clause.id));
  return [...clauses.map((clause) => clause.meaning), ...contract.claims.toReversed()];
}

/** Every slice with its first onset; those that broke first, first. */
function onsets(one) {
  const by = new Map();
  for (const cell of [...one.cells].sort((a, b) => a.since - b.since || (a.slice === "all") - (b.slice === "all") || a.slice.localeCompare(b.slice))) by.set(cell.slice, [...(by.get(cell.slice) ?? []), cell]);
  return el("div", { class: "onsets" }, el("table", { class: "kernels" },
    el("thead", {}, el("tr", {}, ["Slice", "Since", "Until", "Clauses", "Estimate"].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, [...by].map(([slice, cells]) => el("tr", {},
      el("th", { scope: "row" }, el("a", { href: address({ ...one, ...cells[0] }) }, place(slice))),
      el("td", {}, clock(cells[0].since)),
      el("td", {}, cells.some((cell) => cell.until === null) ? "still" : clock(Math.max(...cells.map((cell) => cell.until)))),
      el("td", {}, listed([...new Set(cells.map((cell) => cell.clause))])),
      el("td", {}, cells[0].estimate === null ? "–" : `${number(cells[0].estimate)} of ${number(cells[0].limit)}`))))));
}
