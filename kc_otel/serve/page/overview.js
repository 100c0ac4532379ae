// What is broken, since when, for whom, and what was done about it: in words, the worst first.

import { draw } from "./charts.js";
import { byId, el, fill, sync } from "./dom.js";
import { historyChart, marksOf, pastOf } from "./past.js";
import { STATES, address, clock, count, iso, kernel, lateness, listed, place, span } from "./format.js";

const SLICES = 8;
const DRAWN = 3; // incidents with a picture of their worst cell
const REFRESH = 5000; // milliseconds
const WHOLE = "Every promise holds on what is measured";
const sparks = new Map();
let asked = -Infinity;

export function showOverview({ overview, contracts, promotions, health }) {
  const open = brokenOf(overview);
  const breaches = open.filter((one) => one.on === "fail");
  const broken = breaches.length ? breaches : open;
  const contained = overview.incidents.filter((one) => one.status === "FAIL" && one.state === "contained");
  const silent = overview.incidents.filter((one) => one.state_text === "Ended" ? !one.only_route_left : one.status === "NO_DATA" && one.state_text !== "Waiting for first data");
  const totals = {};
  for (const one of contracts)
    for (const [status, many] of Object.entries(overview.counts[one.name] ?? {})) totals[status] = (totals[status] ?? 0) + many;
  const all = Object.values(totals).reduce((sum, many) => sum + many, 0);
  const stray = promotions.filter((one) => one.seen_serving);
  const [old, words] = [lateness(overview), headline(broken, stray, contained, silent, totals, all, overview, contracts, health)];
  byId("overview-title").textContent = old ? `Nothing has been evaluated for ${span(old, 2)}` : words;
  byId("overview-title").className = old || broken.length || stray.length ? "fail" : contained.length ? "open" : silent.length || Object.keys(health.failures).length || unproven(overview) || overview.missing.length || unheard(contracts, overview).length ? "silent" : routed(overview) ? "open" : words === WHOLE ? "pass" : "";
  byId("overview-sub").textContent = `${old && overview.at ? `At ${clock(overview.at)}: ${words}. ` : ""}${subtitle(overview, contracts, totals, all)}`;
  sync(byId("incidents"), overview.incidents, (one) => one.id, (one) => JSON.stringify([one, kernels(one, contracts), stage(one, promotions), new Date().toDateString()]),
    (one) => card(one, contracts, stage(one, promotions)));
  for (const node of byId("incidents").querySelectorAll("[data-since]"))
    node.textContent = `${span(overview.now - Number(node.dataset.since))} ago`;
  // Who is at work on an incident is among what was done about it.
  const taken = new Set(overview.incidents.filter((one) => one.actions.some((action) => action.kind === "acknowledged")).map((one) => one.contract));
  const held = overview.in_force.filter((one) => one.kind !== "acknowledgement" || !taken.has(one.contract));
  sync(byId("in-force"), held, (one) => `${one.contract} ${one.kind} ${one.slice} ${one.since} ${one.id}`, (one) => `${one.text} ${new Date().toDateString()}`, inForce);
  showEmpty(overview, contracts);
}

/** The past of the worst cell of the first incidents, in their cards. */
export async function showSparks({ overview, events }) {
  const broken = overview.incidents.filter((one) => one.on === "fail" && one.cells.length).slice(0, DRAWN);
  if (performance.now() - asked < REFRESH && broken.every((one) => sparks.has(one.id))) return;
  asked = performance.now();
  for (const id of sparks.keys()) if (!broken.some((one) => one.id === id)) sparks.delete(id);
  await Promise.all(broken.map(async (one) => {
    const [{ contract }, { clause, slice }] = [one, one.cells[0]];
    const response = await fetch(`/api/v1/history?${new URLSearchParams({ contract, clause, slice })}`);
    if (!response.ok) return;
    const title = `${clause} on ${place(slice)} over time`;
    sparks.set(one.id, historyChart(pastOf(await response.json(), one), { title, events: marksOf(events, { contract, clause, slice }), small: true }));
    const node = [...byId("incidents").children].find((card) => card.dataset.key === one.id)?.querySelector(".spark");
    if (node) showSpark(node, sparks.get(one.id));
  }));
}

function showSpark(node, chart) {
  node.hidden = !chart;
  draw(node, chart);
  return node;
}

/** Breaches and invalid input, neither over nor contained, of runs that have not ended. */
export const brokenOf = ({ incidents }) => incidents.filter((one) => one.status === "FAIL" && one.state === "broken" && !one.only_route_left && !one.went_away && one.state_text !== "Ended");

/** True if a breach is over and only its route remains. */
const routed = (overview) => overview.incidents.some((one) => one.only_route_left);

/** True if a breach went away that no verdict has refuted. */
const unproven = (overview) => overview.incidents.some((one) => one.state === "unproven" || one.went_away);

/** Contracts that no kernel has reported to: nothing is known of them. */
const unheard = (contracts, overview) => contracts.filter(({ name, kernels: seen }) => !seen.length && overview.counts[name]?.NO_DATA);

function headline(broken, stray, contained, silent, totals, all, overview, contracts, health) {
  if (broken.length && broken.every((one) => one.on === "invalid-input")) return "Sequences fail the input checks";
  if (broken.length) return `${promisesOf(broken)} broken on ${slicesOf(broken)}`;
  if (stray.length) return `${kernel(contracts.find((one) => one.name === stray[0].contract), "inference", stray[0].kernel)} was measured after its rollback`;
  const kept = contained.filter((one) => one.on === "fail");
  if (kept.length) return `${promisesOf(kept)} broken on ${slicesOf(kept)}, and contained`;
  if (contained.length) return "Sequences fail the input checks; this is contained";
  const lacking = silent.filter((one) => one.state_text !== "Ended");
  if (silent.length) return lacking.length ? `No data on ${slicesOf(lacking)}` : "A run has ended";
  if (Object.keys(health.failures).length) return "Nothing is known to be broken; the evaluator fails";
  if (!overview.at) return "Waiting for the first evaluation";
  if (!overview.heard) return "Waiting for the first data";
  if (overview.missing.length) return `Nothing is known to be broken; ${overview.missing.every((one) => one.outcome === "invalid") ? "sequences" : "points"} arrive that are not judged`;
  if (overview.incidents.some((one) => one.went_away)) return "Nothing is known to be broken; a breach went away without proof of recovery";
  if (unproven(overview)) return "Nothing is known to be broken; a breach is not proven to be over yet";
  if (routed(overview)) return "Nothing is known to be broken; a route remains";
  if ((totals.PASS ?? 0) === all && !overview.incidents.length) return WHOLE;
  const none = unheard(contracts, overview).length;
  if (none) return `Nothing is known to be broken; ${none === 1 ? "one contract is" : `${none} contracts are`} not measured`;
  return "Nothing is known to be broken";
}

/** True if the last verdict on a cell of theirs is a FAIL; otherwise only alerts hold them. */
export const lasts = (incidents) => incidents.some((one) => one.cells.some((cell) => cell.until === null && !cell.held));

function promisesOf(incidents) {
  const promises = new Set(incidents.flatMap((one) => one.clauses.map((clause) => `${one.contract} ${clause}`))).size;
  const [one, several] = lasts(incidents) ? ["is", "are"] : ["was", "were"];
  return `${promises} ${promises === 1 ? `promise ${one}` : `promises ${several}`}`;
}

function slicesOf(incidents) {
  const named = [...new Set(incidents.flatMap((one) => one.slices))].filter((slice) => slice !== "all");
  return named.length > 3 ? `${named.length} slices` : listed(named.length ? named : [place("all")]);
}

function subtitle(overview, contracts, totals, all) {
  if (!overview.heard && overview.incidents.length) return `${count(all)} cells to judge; no data that can be measured have arrived yet.`;
  if (!overview.heard) return all ? `${count(all)} cells to judge; no kernel has reported yet.` : "";
  const said = [];
  if (overview.incidents.length) {
    const first = Math.min(...overview.incidents.map((one) => one.since));
    said.push(`For ${span(overview.now - first, 2)}, since ${clock(first)}.`);
  }
  const silent = unheard(contracts, overview).map((one) => one.name);
  if (silent.length) said.push(`No kernel has reported to ${listed(silent)} yet.`);
  for (const contract of contracts) {
    for (const one of contract.kernels) {
      const of = [...(one.otherwise ?? []), one.silent].filter(Boolean);
      if (of.length) said.push(`${contract.name}, ${one.name}: ${listed(of)}.`);
    }
  }
  const away = contracts.reduce((sum, one) => sum + (overview.no_traffic[one.name] ?? 0), 0);
  const shown = { ...totals, NO_DATA: (totals.NO_DATA ?? 0) - away };
  const parts = Object.entries(STATES).filter(([name]) => shown[name]).map(([name, { word }]) => `${count(shown[name])} ${word.toLowerCase()}`);
  if (away) parts.push(`${count(away)} no traffic`);
  return [...said, `Of ${count(all)} cells: ${parts.join(", ")}.`].join(" ");
}

const kernels = (one, contracts) => {
  const contract = contracts.find((each) => each.name === one.contract);
  return [kernel(contract, "inference", one.kernel_inference), kernel(contract, "train", one.kernel_train)];
};

/** Where the kernel version of an incident is on its way, when it is. */
export function stage(one, promotions) {
  const found = promotions.find((each) => each.contract === one.contract && each.kernel === one.kernel_inference);
  if (found?.status !== "rolled-back") return found && (found.status === "replaced" ? "replaced" : `in ${found.position}`);
  return found.seen_serving ? "rolled back, and measured after that" : "rolled back";
}

function card(one, contracts, place) {
  const { shape, word, tone } = badge(one);
  const [inference, train] = kernels(one, contracts);
  const title = `incident-${one.id}`;
  return el("article", { class: `incident ${tone}`, "aria-labelledby": title },
    el("header", {},
      el("span", { class: `badge ${tone}` }, el("span", { "aria-hidden": "true" }, `${shape} `), word),
      el("h2", { id: title }, el("a", { href: `#/incident/${one.id}`, "data-focus": "headline" }, one.headline)),
      owner(contracts.find((each) => each.name === one.contract), contracts.length > 1)),
    el("ul", { class: "extents" }, one.extents.map(([clause, text]) => el("li", {}, el("strong", {}, clause), " ", text))),
    showSpark(el("a", { class: "spark", href: address({ ...one, ...one.cells[0] }), "data-focus": "spark" }), sparks.get(one.id)),
    el("dl", { class: "facts" },
      fact("Since", el("time", { datetime: iso(one.since) }, clock(one.since)), " · ", el("span", { "data-since": one.since }, "")),
      fact("For whom", where(one), one.growth.length > 1 && el("span", { class: "quiet" }, grown(one))),
      fact("On kernel", inference, place ? `, ${place},` : "", el("span", { class: "quiet" }, ` against ${train}`)),
      ordered(one) && fact("State", one.state_text),
      one.diagnoses.length > 0 && fact("What was found", diagnoses(one)),
      fact("What was done", actionsTaken(one))));
}

/** How an incident is marked: by its state where users are kept from it or it is over, else by its cells' status. */
export function badge(one) {
  if (one.state === "contained") return { shape: "◐", word: "Contained", tone: "open" };
  if (one.state === "unproven" || one.went_away) return { shape: "–", word: "Unproven", tone: "silent" };
  if (one.only_route_left) return { shape: "◐", word: "Route remains", tone: "open" };
  if (one.state === "resolved") return one.state_text === "Resolved" ? { shape: "✓", word: "Resolved", tone: "pass" } : { shape: "–", word: "Over", tone: "silent" };
  if (one.state_text?.startsWith("Was broken")) return { ...STATES.FAIL, word: "Was broken" };
  return one.state_text === "Ended" ? { ...STATES.NO_DATA, word: "Ended" } : STATES[one.on === "invalid-input" ? "INVALID_INPUT" : one.status];
}

/** True if a route is set that no router has applied. */
export const ordered = (one) => one.state_text !== undefined && one.state_text.toLowerCase() !== one.state;

const GROWN = 5;

/** The number of slices that had broken by each time. */
export function grown({ growth }) {
  const steps = growth.length > GROWN ? [...growth.slice(0, GROWN - 1), growth.at(-1)] : growth;
  return steps.map(([at, many], index) => `${count(many)}${index ? "" : many === 1 ? " slice" : " slices"} at ${clock(at)}`).join(", ");
}

/** Owner and runbook: the first questions at night. */
function owner(contract, several) {
  const parts = [several && contract?.name, contract?.owner && `owner ${contract.owner}`, contract && runbook(contract)].filter(Boolean);
  return parts.length > 0 && el("span", { class: "of" }, parts.flatMap((part, index) => (index ? [" · ", part] : [part])));
}

/** A link to the runbook; text where it is none that a browser should follow. */
export function runbook({ runbook: where }) {
  if (!where) return null;
  return /^https?:\/\//.test(where) ? el("a", { href: where, rel: "noopener noreferrer" }, "Runbook") : `runbook ${where}`;
}

const fact = (name, ...value) => el("div", {}, el("dt", {}, name), el("dd", {}, ...value));

function where(one) {
  const bySlice = new Map(one.slices.map((slice) => [slice, null]));
  for (const cell of one.cells) if (!bySlice.get(cell.slice)) bySlice.set(cell.slice, cell);
  const first = [...bySlice].filter(([, cell]) => cell).slice(0, SLICES);
  const left = one.slices.length - first.length;
  return el("ul", { class: "chips" },
    first.map(([slice, cell]) => el("li", {}, el("a", {
      href: address({ ...one, clause: cell.clause, slice }),
      "data-focus": slice,
      "aria-label": `${place(slice)}: open the cell ${cell.clause}`,
    }, place(slice)))),
    left > 0 && el("li", { class: "quiet" }, `and ${left} more, listed below`));
}

export function actionsTaken(one) {
  if (!one.actions.length) return el("span", { class: "quiet" }, "Nothing yet: no step of the escalation policy has fired.");
  return el("ul", { class: "actions-taken" }, one.actions.map((action) => el("li", {},
    el("time", { datetime: iso(action.at) }, clock(action.at)), " ", action.text,
    action.in_force === true && el("span", { class: "tag" }, "in force"),
    action.in_force === false && el("span", { class: "tag over" }, "no longer"))));
}

/** Findings of locate and remedy, each part on its own line, with a link to the evidence. */
export function diagnoses(one) {
  return el("ul", { class: "actions-taken" }, one.diagnoses.map((each) => el("li", {},
    el("strong", {}, FOUND[each.kind] ?? each.kind), " ",
    each.text.split("; ").flatMap((part, at) => (at ? ["; ", el("br"), part] : [part])), " ",
    el("a", { href: `/api/v1/incidents/${one.id}/diagnoses/${each.evidence}` }, "evidence"),
    el("span", { class: "quiet" }, ` ${each.by}, `, el("time", { datetime: iso(each.at) }, clock(each.at))))));
}

const FOUND = { locate: "Which operator:", remedy: "Remedy:" };

const IN_FORCE = {
  route: ["Still routed", (one) => `kc-otel route resume ${one.contract} --slice ${one.slice} --why …`],
  pin: ["Pinned", (one) => `kc-otel route unpin ${one.contract} --slice ${one.slice} --why …`],
  silence: ["Silenced", (one) => `kc-otel alerts unsilence ${one.id} --why …`],
  acknowledgement: ["Acknowledged", null],
  "dry-run": ["Dry run", null],
};

function inForce(one) {
  const [word, command] = IN_FORCE[one.kind] ?? ["In force", null];
  return el("li", {},
    el("strong", {}, `${word}: `), `${one.text}, since `, el("time", { datetime: iso(one.since) }, clock(one.since)),
    one.until && [", until ", el("time", { datetime: iso(one.until) }, clock(one.until))], ".",
    command && el("span", { class: "quiet" }, ` To end it${one.until ? " earlier" : ""}: `, el("code", {}, command(one))));
}

function showEmpty(overview, contracts) {
  const node = byId("empty");
  if (overview.heard || !overview.at || overview.incidents.some((one) => one.on === "invalid-input")) return fill(node);
  if (node.firstChild) return undefined;
  const name = contracts[0]?.name ?? "policy";
  return fill(node, el("div", { class: "next" },
    el("h2", {}, "Send the first data"),
    el("ol", {},
      el("li", {}, "Set the OpenTelemetry endpoint to this evaluator, under a name that your program can resolve.",
        el("pre", {}, el("code", {}, `export OTEL_EXPORTER_OTLP_ENDPOINT=${location.protocol}//${location.hostname}:${overview.otlp_port}\nexport OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf`))),
      el("li", {}, "Pass both kernels’ log-probabilities of the sampled tokens to a recorder.",
        el("pre", {}, el("code", {}, `import kc_otel\n\nrecorder = kc_otel.Recorder("${name}.yaml", train=kc_otel.Kernel("torch"), inference=kc_otel.Kernel("vllm"))\nrecorder.compare(train_logprobs, rollout_logprobs, mask=mask)`))),
      el("li", {}, "Watch this page: the first verdicts appear within seconds of the first export.")),
    el("p", { class: "quiet" }, "Nothing here after sending? “The evaluator” below counts the points that arrived and those that were rejected, with the reason.")));
}
