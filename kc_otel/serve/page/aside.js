// Beside the cells: what is in force, and how the evaluator itself is doing.

import { byId, el, fill } from "./dom.js";
import { clock, count, kernel, listed, place, span } from "./format.js";

const REFUSED = ["malformed", "unknown_contract", "unknown_slice", "future", "late", "other_buckets",
  "contradictory", "unordered", "over_cap", "behind", "two_writers", "unjudged"];
const REMEDIES = {
  malformed: "points lack attributes or cannot be read",
  unknown_contract: "the contract they name is not loaded here",
  unknown_slice: "the slice they name is not in the contract, or is another one there",
  future: "the sender’s clock is ahead",
  late: "older than the long window",
  behind: "older than the short window when they arrive: is the sender’s clock behind?",
  other_buckets: "senders of a metric disagree about the bounds of its buckets",
  contradictory: "a cumulative value that cannot follow the one before it",
  unordered: "deltas that arrived too late",
  dropped: "recorders that dropped batches, which their logs explain",
  over_cap: "more streams than observability.max_series allows",
  two_writers: "senders share an identity: give each its own service.instance.id",
  unjudged: "more series or kernel pairs than a contract may have; they are counted but not judged",
};
const FEW = 6; // routes that are listed one by one
const ASKED = {
  "sample-more": "Recorders are asked to sample more",
  locate: "Machines are asked to locate the operator",
  "hold-promotion": "Promotion of this version is held",
  "quarantine-rollouts": "Trainers are asked to quarantine rollouts",
  "resync-weights": "Trainers are asked to send the weights again",
  halt: "Trainers are asked to halt",
};

const LISTENS = 90; // seconds within which a program that looks at what is asked for says so

/** Since when something is asked for that no program looks at; 0 where one does, or may not have said so yet. */
export function unheard(one, health, now) {
  const kinds = health?.listeners?.[one.contract];
  if (!kinds || !(one.kind in kinds) || now - one.since < LISTENS) return 0;
  return now - (kinds[one.kind] ?? 0) > LISTENS ? one.since : 0;
}

const NOBODY = {
  "sample-more": "no recorder follows this evaluator (recorder.follow)",
  locate: "no machine runs kc-otel locate run --follow",
  "quarantine-rollouts": "no training loop drops them (recorder.follow)",
  "resync-weights": "no training loop can send them (recorder.follow with send_weights)",
  halt: "no training loop asks whether it should stop (recorder.follow)",
};

export function showDecisions({ decisions, contracts, health, overview }) {
  const names = new Set(contracts.map((one) => one.name));
  const routes = decisions.routes.filter((one) => names.has(one.contract));
  const asked = decisions.directives.filter((one) => names.has(one.contract));
  if (!routes.length && !asked.length) return fill(byId("decisions-body"), el("p", { class: "quiet" }, "No route is in force, and the policy asks for nothing."));
  return fill(byId("decisions-body"), el("ul", { class: "plain" },
    byKernel(routes).map(([avoid, found]) => (found.length > FEW ? [together(avoid, found)] : found.map(alone))),
    grouped(asked).map(([kind, slices, since, one]) => el("li", {}, el("strong", {}, ASKED[kind] ?? kind), ` because of ${listed(slices.map(place))}${one.version && ` of ${one.version}`}, since ${clock(since)}.`,
      unheard({ ...one, since }, health, overview?.now ?? 0) ? el("span", { class: "warning" }, " No program acts on this: ", NOBODY[kind] ?? "no program follows this evaluator", ".") : ""))));
}

function byKernel(routes) {
  const by = new Map();
  for (const one of routes) by.set(one.avoid, [...(by.get(one.avoid) ?? []), one]);
  return [...by];
}

const alone = (one) => el("li", {}, el("strong", {}, place(one.slice)), " is to be routed to the training kernel, away from ", el("code", {}, one.avoid), `, since ${clock(one.since)}`,
  one.until ? ` until ${clock(one.until)}` : "", ". ", one.outdated ? el("span", { class: "warning" }, `But ${one.outdated}. `) : "", el("span", { class: "quiet" }, `${one.clause}: ${one.reason}`));

const together = (avoid, routes) => el("li", {}, el("strong", {}, listed(routes.map((one) => place(one.slice)), 12)), " are to be routed to the training kernel, away from ", el("code", {}, avoid),
  `, the first since ${clock(Math.min(...routes.map((one) => one.since)))}.`,
  [...new Set(routes.map((one) => one.outdated))].filter(Boolean).map((why) => el("span", { class: "warning" }, ` But of ${listed(routes.filter((one) => one.outdated === why).map((one) => place(one.slice)), 12)}: ${why}.`)));

function grouped(directives) {
  const by = new Map();
  for (const one of directives) {
    const key = `${one.contract} ${one.kind} ${one.version}`, known = by.get(key) ?? [one.kind, [], one.since, one];
    if (!known[1].includes(one.slice)) known[1].push(one.slice);
    known[2] = Math.min(known[2], one.since);
    by.set(key, known);
  }
  return [...by.values()];
}

const PATHS = {
  "rolled-back": ["✕", "fail", "is rolled back"],
  replaced: ["·", "", "was replaced in"],
  running: ["→", "open", "is in"],
};

/** Where every kernel version is on its way to all traffic, and what its next step waits for. */
export function showPromotions({ promotions, contracts }) {
  byId("promotions").hidden = !promotions.length;
  fill(byId("promotions-body"), el("ul", { class: "plain" }, promotions.map((one) => {
    const [shape, tone, verb] = one.status === "running" && one.stage === "full" ? ["·", "", "is in"] : PATHS[one.status] ?? PATHS.running;
    const left = one.hold ? `Held by ${one.hold.by} since ${clock(one.hold.at)}: ${one.hold.why}.` : one.missing.length ? `${one.next} needs: ${listed(one.missing, 2).replaceAll("`", "")}.` : one.reason;
    return el("li", {},
      el("span", { class: `shape ${tone}`, "aria-hidden": "true" }, shape), " ",
      el("strong", {}, kernel(contracts.find((each) => each.name === one.contract), "inference", one.kernel)),
      ` ${verb}${one.status === "rolled-back" ? "" : ` ${one.position}`}, since ${clock(one.entered)}. `,
      one.seen_serving && el("strong", {}, `It was measured after that, at ${clock(one.seen_serving)}: it may still serve, or what it had answered before is measured late. `),
      one.status === "running" && !["offline-ci", "full"].includes(one.stage) && `${one.windows} of ${one.windows_needed} windows passed. `,
      one.elsewhere && !left.includes(one.elsewhere) && `${one.elsewhere[0].toUpperCase()}${one.elsewhere.slice(1)}. `,
      el("span", { class: "quiet" }, left));
  })));
}

const webhook = (one) => {
  if (one.disabled) return `disabled since ${clock(one.disabled_at)} (${one.disabled}), ${count(one.waiting)} waiting`;
  if (!one.waiting) return one.parked ? `none waits; ${count(one.parked)} given up, the newest of ${clock(one.given_up)}: refused, or expired` : "nothing waits";
  return `${count(one.waiting)} waiting${one.oldest ? ` since ${clock(one.oldest)}` : ""}${one.error ? `: ${one.error}` : ""}`;
};

const shard = (one) => one.trouble || `${count(one.streams)} streams on ${one.node} (${one.pid}), ${count(one.lag + one.waiting)} bytes behind`;

export function showHealth({ health, overview }) {
  const refused = REFUSED.filter((name) => health.points[name]);
  const invalid = Object.values(health.invalid).flatMap((reasons) => Object.entries(reasons));
  const rows = [
    ["Last evaluation", health.evaluated_at ? `${span(overview.now - health.evaluated_at)} ago, took ${Math.round(health.tick_seconds * 1000)} ms` : "not yet"],
    ["Points accepted", count(health.points.accepted ?? 0)],
    ["Points rejected", refused.length ? refused.map((name) => `${count(health.points[name])} ${name.replaceAll("_", " ")}: ${REMEDIES[name]}`).join("; ") : "none"],
    ["Series", count(health.series)],
    ...Object.entries(health.failures).map(([name, why]) => [`Fails${name && `: ${name}`}`, why]),
    ["Sequences that failed input checks", invalid.length ? invalid.map(([reason, many]) => `${count(many)} ${reason}`).join(", ") : "none"],
    ...health.shards.map((one) => [`Shard ${one.number}`, shard(one)]),
    ...health.outbox.map((one) => [`Webhook ${one.endpoint}`, webhook(one)]),
  ];
  fill(byId("health-body"), el("dl", { class: "rows-list" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
}
