// What keeps the page, or a person, from knowing how things are: above everything else.

import { byId, el, sync } from "./dom.js";
import { clock, count, lateness, span } from "./format.js";

const PATIENCE = 60; // seconds that a webhook may take

/** `lost` is since when nobody answers, unix seconds, and 0 while somebody does. */
export function showNotices({ overview, health }, lost) {
  const said = [];
  if (lost) said.push(["lost", `No answer from the evaluator since ${clock(lost)}.`, overview ? ` What is below is from ${clock(overview.now)} and may have changed. Trying again every few seconds.` : " Trying again every few seconds. Is kc-otel serve running?"]);
  const failing = Object.entries(health?.failures ?? {}).map(([name, fault]) => `${name || "all contracts"}: ${fault}`).join("; ");
  if (lateness(overview)) said.push(["old", `Nothing has been judged for ${span(lateness(overview))}.`, ` The evaluator answers, but what is below is old; ${failing || "its log says why"}.`]);
  for (const one of health?.outbox ?? []) {
    if (one.disabled) said.push([`off ${one.endpoint}`, `${one.endpoint} is not told any more.`, ` ${one.disabled}; once it takes messages again: kc-otel enable-webhook`]);
    else if (one.oldest && overview.now - one.oldest > PATIENCE) said.push([`late ${one.endpoint}`, `${one.endpoint} has not been told.`, ` ${count(one.waiting)} ${one.waiting === 1 ? "webhook waits" : "webhooks wait"} since ${clock(one.oldest)}${one.error ? `: ${one.error}` : "."}`]);
  }
  document.querySelector("main").classList.toggle("stale", Boolean(lost));
  sync(byId("notices"), said, ([key]) => key, ([, ...texts]) => texts.join(""), ([, strong, rest]) => el("p", { class: "warning" }, el("span", { class: "shape", "aria-hidden": "true" }, "!"), el("strong", {}, strong), rest));
}
