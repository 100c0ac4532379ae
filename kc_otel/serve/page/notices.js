// Warnings that the page may be out of date or that messages are stuck, above everything else.

import { byId, el, sync } from "./dom.js";
import { clock, count, kernel, lateness, span } from "./format.js";

const WEBHOOK_SECONDS = 60; // time that a webhook may take
const FEW = 3; // reasons for points that are not judged that have a notice each

/** `lost` is since when nobody answers, unix seconds, and 0 while somebody does. */
export function showNotices({ overview, contracts, health }, lost) {
  const said = [];
  if (lost) said.push(["lost", `The evaluator has not answered since ${clock(lost)}.`, overview ? ` This page is as of ${clock(overview.now)}. Retrying every few seconds.` : " Retrying every few seconds. Is kc-otel serve running?"]);
  const failing = Object.entries(health?.failures ?? {}).map(([name, fault]) => `${name || "all contracts"}: ${fault}`).join("; ");
  if (lateness(overview)) said.push(["old", `Nothing has been evaluated for ${span(lateness(overview))}.`, ` The evaluator answers, but this page is out of date; ${failing || "its log says why"}.`]);
  else if (failing) said.push(["fails", "The evaluator fails: what arrives may be refused, or not judged.", ` ${failing}.`]);
  const missing = overview?.missing ?? [];
  if (missing.length > FEW) said.push(["missing", `Points of ${count(missing.length)} kernel pairs are not judged.`, " kc-otel status says of whom, and why."]);
  else for (const one of missing) {
    const of = contracts.find((each) => each.name === one.contract);
    const pair = [one.kernel_inference && kernel(of, "inference", one.kernel_inference), one.kernel_train && kernel(of, "train", one.kernel_train)].filter(Boolean);
    said.push([`missing ${one.contract} ${one.outcome} ${pair}`, `${one.outcome === "invalid" ? "Sequences" : "Points"}${pair.length ? ` of ${pair.join(" against ")}` : ""} are not judged, since ${clock(one.since)}.`, ` ${one.contract}: ${one.text.replace(/\.$/, "")}.`]);
  }
  for (const one of health?.outbox ?? []) {
    if (one.disabled) said.push([`off ${one.endpoint}`, `${one.endpoint} gets no messages since ${clock(one.disabled_at)}.`, ` It answered ${one.disabled}, and ${count(one.waiting)} wait; once it accepts messages, change its credential file or restart the evaluator.`]);
    else if (one.oldest && overview.now - one.oldest > WEBHOOK_SECONDS) said.push([`late ${one.endpoint}`, `${one.endpoint} is not receiving its messages.`, ` ${count(one.waiting)} ${one.waiting === 1 ? "webhook waits" : "webhooks wait"} since ${clock(one.oldest)}${one.error ? `: ${one.error}` : "."}`]);
  }
  document.querySelector("main").classList.toggle("stale", Boolean(lost));
  sync(byId("notices"), said, ([key]) => key, ([, ...texts]) => texts.join(""), ([, strong, rest]) => el("p", { class: "warning" }, el("span", { class: "shape", "aria-hidden": "true" }, "!"), el("strong", {}, strong), rest));
}
