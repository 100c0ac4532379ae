// The two causes of a difference, the kernels and the age of the weights, and its mean by that age.

import { el } from "./dom.js";
import { number } from "./format.js";

const COLUMNS = ["Versions behind", "Share", "Estimate", "Confidence interval"];

/** What grew, in words, and a row for each lag; nothing where no older weights sampled. */
export function twoCauses(causes) {
  if (!causes) return null;
  const row = ({ lag, share, estimate, lower, upper }) => el("tr", {},
    el("th", { scope: "row" }, lag),
    [`${number(100 * share)} %`, number(estimate), `${number(lower)} to ${number(upper)}`].map((text) => el("td", {}, text)));
  return [
    el("h3", {}, "Two causes"),
    el("p", {}, causes.text),
    el("table", { class: "kernels" },
      el("thead", {}, el("tr", {}, COLUMNS.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, causes.by_lag.map(row))),
  ];
}
