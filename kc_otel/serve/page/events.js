// The log of events: one line for what happened at one moment for one reason, however many cells it was about.

import { byId, el, fill, sync } from "./dom.js";
import { action, clock, iso, listed, place } from "./format.js";

export const KINDS = {
  verdict: ["•", "verdict"],
  firing: ["▲", "alert"],
  resolved: ["▽", "resolved"],
  "would-fire": ["△", "alert"],
  "would-resolve": ["▽", "resolved"],
  "silence-ended": ["▲", "alert"],
  reminder: ["▲", "reminder"],
  promotion: ["→", "promotion"],
};
export const PERSON = ["☞", "person"];
const WHAT = { "no-data": "no data for", inconclusive: "undecided:", "invalid-input": "invalid:" };
const FEW = 14;
let everything = false;

/** Events without those of other contracts, newest first; alerts about several cells of one moment as one. */
export function grouped(events) {
  const groups = [];
  const open = new Map();
  for (const event of events) {
    const { clause, slice, severity, on, actions } = event.data;
    const together = (event.kind === "firing" || event.kind === "resolved") && clause && slice && !event.data.silenced;
    const how = event.kind === "resolved" ? around(event) : [severity, actions]; // each step of the ladder ends alike
    const key = JSON.stringify([event.contract, event.kind, event.at, on, how]);
    if (together && open.has(key)) open.get(key).push(event);
    else {
      const members = [event];
      if (together) open.set(key, members);
      groups.push(members);
    }
  }
  return groups;
}

/** What the message of an alert says before and after its clause and slice. */
function around({ contract, message, data }) {
  const where = data.slice === "all" ? place("all") : `slice ${data.slice}`;
  return message.replace(`${contract}: `, "").split(`${data.clause} on ${where}`);
}

function said(members, several) {
  const [event] = members;
  const of = several ? `${event.contract}: ` : "";
  if (members.length === 1) return of + event.message.replace(`${event.contract}: `, "").replace(" -> ", " → ");
  const clauses = listed([...new Set(members.map((one) => one.data.clause))]);
  const slices = listed([...new Set(members.map((one) => place(one.data.slice)))]);
  if (event.kind === "resolved") {
    const [before, after = ""] = around(event);
    const end = members.every((one) => one.message === event.message) ? after : after.replace(/^ is /, " are ");
    return `${of}${before}${after && `${clauses} on ${slices}${end}`} (${members.length} alerts)`;
  }
  const what = WHAT[event.data.on] ?? "broken:";
  return `${of}${what} ${clauses} on ${slices} (${members.length} alerts)`;
}

function tone({ kind, data }) {
  if (kind === "firing" && data.on in WHAT) return data.on === "inconclusive" ? "open" : "silent";
  if (kind === "firing" || data.status === "FAIL") return "fail";
  if (kind === "resolved" || data.status === "PASS") return "pass";
  return data.status === "NO_DATA" ? "silent" : "open";
}

/** One line of the log; also used for a single cell. */
export function eventLine(members, several) {
  const [event] = members;
  const [shape, word] = KINDS[event.kind] ?? (event.data.by ? PERSON : ["·", event.kind.replaceAll("-", " ")]);
  const done = event.kind === "firing" ? (event.data.actions ?? []).map(action) : [];
  return el("li", {},
    el("time", { datetime: iso(event.at) }, clock(event.at)),
    el("span", { class: `shape ${tone(event)}`, "aria-hidden": "true" }, shape),
    el("span", {}, el("span", { class: "kind" }, word), " ", said(members, several),
      el("span", { class: "quiet" }, `${event.data.silenced ? " Silenced." : ""}${done.length ? ` Then: ${done.join(", ")}.` : ""}`)));
}

export function showEvents({ events, contracts }) {
  const list = byId("events");
  if (!events.length) return fill(list, el("li", { class: "quiet none" }, "Nothing yet. Alerts, routes and what people do appear here."));
  list.querySelector(".none")?.remove();
  const groups = grouped(events);
  const more = byId("events-more");
  more.hidden = everything || groups.length <= FEW;
  more.onclick = () => { everything = true; showEvents({ events, contracts }); };
  const several = contracts.length > 1;
  const day = new Date().toDateString(); // a line says its date once it is not today's
  return sync(list, everything ? groups : groups.slice(0, FEW), ([one]) => String(one.id), (one) => `${day} ${several} ${one.length}`, (one) => eventLine(one, several));
}
