// The worst sequences of a cell: prompts and completions, fetched only when somebody opens them.

import { byId, el, fill } from "./dom.js";
import { iso, clock, number } from "./format.js";

const STEPS = [0.1, 0.5, 1]; // nats of drift from which a token is marked more strongly

/** The place for them, closed. `where` gives the cell's address in the API when it is opened. */
export function worstSequences(where) {
  const opened = ({ currentTarget }) => currentTarget.open && show(where());
  return el("details", { id: "cell-worst", on: { toggle: opened } },
    el("summary", {}, "Worst sequences"),
    el("div", { id: "cell-worst-body", role: "status" }));
}

async function show({ contract, clause, slice, kernel_inference }) {
  const body = byId("cell-worst-body");
  fill(body, el("p", { class: "quiet" }, "Loading"));
  const response = await fetch(`/api/v1/worst?${new URLSearchParams({ contract, clause, slice, kernel_inference })}`).catch(() => null);
  const answer = await response?.json().catch(() => null);
  if (!body.isConnected) return;
  if (!response?.ok || !answer) return fill(body, el("p", { class: "quiet" }, answer?.detail ?? "No answer from the evaluator."));
  if (!answer.sequences.length) return fill(body, el("p", { class: "quiet" }, "No sequence is stored for this cell and kernel."));
  return fill(body, el("ol", { class: "worst" }, answer.sequences.map(sequence)));
}

function sequence(one) {
  const sizes = one.log_ratios.map(Math.abs);
  const worst = sizes.indexOf(Math.max(...sizes));
  return el("li", {},
    el("p", {}, el("strong", {}, number(one.value)), ` in request ${one.request_id}, `, el("time", { datetime: iso(one.at) }, clock(one.at)),
      one.trace_id && [", trace ", el("code", {}, one.trace_id)]),
    el("p", { class: "quiet" }, `Prompt of ${one.prompt_tokens} tokens${one.prompt_hash ? `, kept as its hash ${one.prompt_hash}` : ""}`),
    one.prompt && el("pre", { class: "text", tabindex: "0" }, one.prompt),
    el("p", { class: "quiet" }, `Completion of ${sizes.length} tokens`, worst >= 0 && `: most drift at token ${worst + 1}${one.tokens.length ? `, “${one.tokens[worst]}”` : ""}, log P/Q ${number(one.log_ratios[worst])} nats`),
    one.tokens.length > 0 && el("pre", { class: "text", tabindex: "0" }, one.tokens.map((token, index) => {
      const strength = STEPS.filter((step) => sizes[index] >= step).length;
      return strength ? el("mark", { class: `drift-${strength}`, title: `log P/Q ${number(one.log_ratios[index])} nats` }, token) : token;
    })));
}
