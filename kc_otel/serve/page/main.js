// Reads the API again and again, and lets each part of the page show what changed.

import { byId, el, fill, sync } from "./dom.js";
import { LEGEND, STATES, ZONE, clock, lateness, place } from "./format.js";
import { showDecisions, showHealth, showPromotions } from "./aside.js";
import { closeCell, openCell, refreshCell } from "./cell.js";
import { showEvents } from "./events.js";
import { showGrids, watchFilter } from "./grid.js";
import { closeIncident, openIncident, refreshIncident } from "./incident.js";
import { showNotices } from "./notices.js";
import { badge, brokenOf, lasts, showOverview, showSparks } from "./overview.js";

const MIN_WAIT = 1000;
const MAX_WAIT = 15000;
const SHARE = 10; // no more than a tenth of the time is spent on asking and drawing
const EVENTS = 150;
const STRAY = { ...STATES.FAIL, word: "Measured after its rollback" };
const UNJUDGED = { ...STATES.NO_DATA, word: "Not all judged" };

const state = { contracts: [], overview: null, cells: [], events: [], decisions: null, health: null, promotions: [], only: "" };
let paused = false;
let timer = 0;
let lost = 0;
let seen = new Map();

async function get(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(10000) });
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}

async function look() {
  clearTimeout(timer);
  const started = performance.now();
  try {
    const [contracts, overview, cells, events, decisions, health, promotions] = await Promise.all([
      get("/api/v1/contracts"),
      get("/api/v1/overview"),
      get("/api/v1/verdicts"),
      get(`/api/v1/events?newest=${EVENTS}&verdicts=${byId("verdicts").checked}`),
      get("/api/v1/decisions"),
      get("/api/v1/health"),
      get("/api/v1/promotions"),
    ]);
    if (state.overview && state.overview.version !== overview.version) location.reload(); // this page is of another version
    Object.assign(state, {
      contracts: contracts.contracts, overview, cells: cells.verdicts, events: events.events.reverse(), decisions, health,
      promotions: promotions.promotions,
    });
    const news = lost ? "The evaluator answers again. " : "";
    lost = 0;
    show(news);
    if (lateness(overview)) live("lost", overview.at ? `Last evaluated at ${clock(overview.at)}` : "Nothing evaluated yet");
    else live("ok", `Live, ${clock(overview.at ?? overview.now)}`);
    await Promise.all([refreshCell(state), refreshIncident(state), showSparks(state)]);
  } catch (error) {
    lost ||= Date.now() / 1000;
    live("lost", "No answer");
    unanswered();
    console.warn(error.message);
  }
  showNotices(state, lost);
  // The title of a page behind others tells what is broken, too.
  if (!paused) timer = setTimeout(look, document.hidden ? MAX_WAIT : Math.min(Math.max(MIN_WAIT, SHARE * (performance.now() - started)), MAX_WAIT));
}

/** Everything on the page, for the contract chosen in the address or for all of them. */
function show(news = "") {
  const only = state.only;
  const mine = (one) => !only || one.contract === only;
  const cells = state.cells.filter(mine);
  const contracts = state.contracts.filter((one) => !only || one.name === only);
  const narrowed = {
    ...state,
    contracts,
    cells,
    events: state.events.filter(mine),
    promotions: state.promotions.filter(mine),
    overview: {
      ...state.overview,
      incidents: state.overview.incidents.filter(mine),
      missing: state.overview.missing.filter(mine),
      in_force: state.overview.in_force.filter(mine),
    },
  };
  showContracts();
  showOverview(narrowed);
  showGrids(narrowed);
  showEvents(narrowed);
  showDecisions(narrowed);
  showPromotions(narrowed);
  showHealth(narrowed);
  byId("version").textContent = `kc-otel ${state.overview.version}`;
  document.title = title(narrowed);
  if (lost) unanswered(); // the filter and the address choose from what was
  announce(cells, news);
}

function unanswered() {
  document.title = "! no answer · kc-otel";
  fill(byId("overview-title"), "No evaluator answers");
  byId("overview-title").className = "fail";
}

export function title({ overview, promotions }) {
  if (lateness(overview)) return "! nothing is judged · kc-otel";
  const open = brokenOf(overview);
  const broken = open.filter((one) => one.on === "fail");
  const contained = overview.incidents.filter((one) => one.state === "contained").length;
  if (broken.length) return `✕ ${lasts(broken) ? broken.length : "was"} broken · kc-otel`;
  if (promotions.some((one) => one.seen_serving)) return "✕ measured after its rollback · kc-otel";
  return open.length ? "⊘ invalid input · kc-otel" : contained ? `◐ ${contained} contained · kc-otel` : "kc-otel";
}

function showContracts() {
  const every = state.contracts.length > 1 ? [{ name: "", status: null }, ...state.contracts] : state.contracts;
  const mark = (one) => {
    const own = (row) => row.contract === one.name;
    const open = state.overview.incidents.filter(own).slice(0, 1).map(badge); // its most urgent one
    if (open[0]?.tone !== "fail" && state.promotions.some((row) => own(row) && row.seen_serving)) return STRAY;
    return open[0] ?? (one.status === "PASS" && state.overview.missing.some(own) ? UNJUDGED : STATES[one.status]);
  };
  sync(
    byId("contracts"), every,
    (one) => one.name,
    (one) => `${mark(one)?.word} ${one.version} ${state.only === one.name}`,
    (one) => el("a", {
      href: one.name && state.contracts.length > 1 ? `#/contract/${encodeURIComponent(one.name)}` : "#/",
      "aria-current": (state.only || "") === one.name && state.contracts.length > 1 ? "page" : null,
      "data-focus": "link",
    },
    one.name && el("span", { class: `shape ${mark(one).tone}`, "aria-label": mark(one).word, role: "img" }, mark(one).shape),
    one.name ? `${one.name} v${one.version}` : "All contracts"),
  );
}

/** Say what changed to who cannot see it: at most three cells by name. */
function announce(cells, news) {
  const now = new Map(cells.map((v) => [`${v.contract}/${v.clause}/${v.slice}/${v.kernel_inference}`, v]));
  const changed = [...now].filter(([key, v]) => seen.size && seen.has(key) && seen.get(key) !== v.status).map(([, v]) => v);
  if (changed.length || news) {
    const said = changed.slice(0, 3).map((v) => `${v.clause} on ${place(v.slice)}: ${STATES[v.status].word}`);
    if (changed.length > 3) said.push(`and ${changed.length - 3} more changes`);
    byId("announce").textContent = `${news}${said.map((one) => `${one}. `).join("")}`.trim();
  }
  seen = new Map([...now].map(([key, v]) => [key, v.status]));
}

function live(mood, text) {
  byId("live-dot").className = `dot ${paused ? "paused" : mood}`;
  byId("live-text").textContent = paused && mood === "ok" ? text.replace("Live,", "Paused at") : text;
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // an address that somebody typed
  }
}

/** The address says which contract is shown and which cell is open: both can be linked to. */
function follow() {
  const [kind, ...parts] = location.hash.replace(/^#\//, "").split("/").map(decoded);
  const back = () => { location.hash = state.only ? `#/contract/${encodeURIComponent(state.only)}` : "#/"; };
  const [cell, incident] = [kind === "cell" && parts.length >= 3, kind === "incident" && parts.length > 0];
  if (!incident) closeIncident();
  if (cell) return openCell(state, parts, back);
  closeCell();
  if (incident) return openIncident(state, parts[0], back);
  const only = kind === "contract" ? parts[0] : "";
  if (only !== state.only) {
    state.only = only;
    seen = new Map();
    if (state.overview) show();
  }
  return undefined;
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  byId("pause").textContent = paused ? "Resume" : "Pause";
  look();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && !paused) look(); });
window.addEventListener("hashchange", follow);
byId("verdicts").addEventListener("change", look);
watchFilter(() => state.overview && show());
fill(byId("legend"), ...LEGEND.map(({ shape, word, tone, means }) =>
  el("span", {}, el("span", { class: `shape ${tone}`, "aria-hidden": "true" }, shape), ` ${word}: ${means}`)), el("span", {}, "% or ×: how much of its limit the deciding bound takes"));
byId("zone").textContent = `Times are in ${ZONE}`;
follow();
look();
