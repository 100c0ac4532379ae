// Beside the cells: what happened, what is in force, and how the evaluator itself is doing.

import { byId, el, fill, sync } from "./dom.js";
import { clock, count, iso, place, span } from "./format.js";

const KINDS = {
  verdict: ["•", "verdict"],
  firing: ["▲", "alert"],
  resolved: ["▽", "resolved"],
  resumed: ["↺", "resumed"],
};
const FEW = 14;
let everything = false;
const REFUSED = ["malformed", "unknown_contract", "unknown_slice", "future", "late", "over_cap"];
const REMEDIES = {
  malformed: "points lack attributes or cannot be read",
  unknown_contract: "the contract they name is not loaded here",
  unknown_slice: "the slice they name is not in the contract",
  future: "the sender’s clock is ahead",
  late: "older than the long window",
  over_cap: "more series than observability.max_series",
};

/** An action as a contract writes it: `notify`, or `{webhook: pager}`. */
const action = (one) => (typeof one === "string" ? one : Object.entries(one).flat().join(" "));

const said = (event, several) => event.message.replace(several ? "" : `${event.contract}: `, "").replace(" -> ", " → ");

/** One line of the log of events; also used for a single cell. */
export function eventLine(event, several) {
  const [shape, word] = KINDS[event.kind] ?? ["·", event.kind];
  const status = event.data.status;
  const tone = event.kind === "firing" || status === "FAIL" ? "fail" : status === "PASS" || event.kind === "resolved" ? "pass" : status === "NO_DATA" ? "silent" : "open";
  return el("li", { class: tone },
    el("time", { datetime: iso(event.at) }, clock(event.at)),
    el("span", { class: `shape ${tone}`, "aria-hidden": "true" }, shape),
    el("span", {}, el("span", { class: "kind" }, word), " ", said(event, several),
      event.kind === "firing" && event.data.actions?.length ? el("span", { class: "quiet" }, ` Then: ${event.data.actions.map(action).join(", ")}.`) : null));
}

export function showEvents({ events, contracts }) {
  if (!events.length) return fill(byId("events"), el("li", { class: "quiet none" }, "Nothing yet. Changes of verdicts, alerts, routes and what people do appear here."));
  byId("events").querySelector(".none")?.remove();
  const more = byId("events-more");
  more.hidden = everything || events.length <= FEW;
  more.onclick = () => { everything = true; showEvents({ events, contracts }); };
  return sync(byId("events"), everything ? events : events.slice(0, FEW), (one) => String(one.id), () => clock(0).slice(0, 6), (one) => eventLine(one, contracts.length > 1));
}

export function showDecisions({ decisions, contracts }) {
  const names = new Set(contracts.map((one) => one.name));
  const routes = decisions.routes.filter((one) => names.has(one.contract));
  const asked = decisions.directives.filter((one) => names.has(one.contract));
  if (!routes.length && !asked.length) return fill(byId("decisions-body"), el("p", { class: "quiet" }, "No route and no hold: every slice is served by the inference kernel."));
  return fill(byId("decisions-body"), el("ul", { class: "plain" },
    routes.map((one) => el("li", {}, el("strong", {}, place(one.slice)), " is served by the training kernel, not by ", el("code", {}, one.avoid), `, since ${clock(one.since)}`,
      one.until ? ` until ${clock(one.until)}` : "", ". ", el("span", { class: "quiet" }, one.reason))),
    grouped(asked).map(([kind, slices, since]) => el("li", {}, el("strong", {}, kind), ` for ${slices.map(place).join(", ")}, since ${clock(since)}.`))));
}

function grouped(directives) {
  const by = new Map();
  for (const one of directives) {
    const known = by.get(`${one.contract} ${one.kind}`) ?? [one.kind, [], one.since];
    if (!known[1].includes(one.slice)) known[1].push(one.slice);
    known[2] = Math.min(known[2], one.since);
    by.set(`${one.contract} ${one.kind}`, known);
  }
  return [...by.values()].map(([kind, slices, since]) => [kind, slices.length > 6 ? [...slices.slice(0, 6), `${slices.length - 6} more`] : slices, since]);
}

export function showHealth({ health, overview }) {
  const refused = REFUSED.filter((name) => health.points[name]);
  const invalid = Object.values(health.invalid).flatMap((reasons) => Object.entries(reasons));
  const rows = [
    ["Last evaluation", health.evaluated_at ? `${span(overview.now - health.evaluated_at)} ago, took ${Math.round(health.tick_seconds * 1000)} ms` : "not yet"],
    ["Points taken", count(health.points.accepted ?? 0)],
    ["Points refused", refused.length ? refused.map((name) => `${count(health.points[name])} ${name.replaceAll("_", " ")}: ${REMEDIES[name]}`).join("; ") : "none"],
    ["Series", count(health.series)],
    ["Sequences that failed input checks", invalid.length ? invalid.map(([reason, many]) => `${count(many)} ${reason}`).join(", ") : "none"],
    ...health.outbox.map((one) => [`Webhook ${one.endpoint}`, one.disabled || (one.waiting ? `${count(one.waiting)} waiting${one.oldest ? ` since ${clock(one.oldest)}` : ""}${one.error ? `: ${one.error}` : ""}` : "delivered")]),
  ];
  fill(byId("health-body"), el("dl", { class: "rows-list" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
}
