// The chart of what locate found: error along the depth of a model.

import { label, line, stroke } from "./charts.js";
import { number } from "./format.js";

const LOWEST = 1e-9; // relative errors below are none
const QUANTITIES = [
  ["own error, on the training kernel's inputs", (row) => row.local.estimate, "accent", 1.75, []],
  ["drift as they run, completions (decode)", (row) => (Number.isNaN(Number(row.decode)) ? row.drift.estimate : row.decode), "fail", 2.25, []],
  ["drift as they run, prompts (prefill)", (row) => row.prefill, "fail", 1.5, [1, 3]],
  ["training kernel against itself", (row) => row.train_noise, "open", 2, [5, 3]],
  ["inference kernel against itself", (row) => row.inference_noise, "silent", 2, [9, 3, 2, 3]],
  ["rounding to the inference kernel's number format", (row) => row.precision, "quiet", 1.5, [2, 3]],
];

/** Relative error over the boundaries of a model in the order of execution, from locate's evidence; the culprit is marked. */
export function depthChart({ boundaries, culprit, slice }) {
  const name = ({ layer, operator, part }) => `${layer === null ? "" : `layer ${layer}, `}${operator}${part ? ` (output ${part + 1})` : ""}`.slice(0, 80);
  const names = boundaries.map((row) => name(row.boundary));
  const marked = culprit ? names.indexOf(name(culprit.boundary)) : -1;
  const found = QUANTITIES.map(([said, of, ...looks]) => [said, boundaries.map((row) => Number(of(row))), ...looks]);
  const there = (values) => values.some((value) => value > LOWEST);
  const drawn = found.filter(([, values]) => values.some((value) => !Number.isNaN(value)));
  const seen = found.flatMap(([, values]) => values).filter((value) => Number.isFinite(value) && value > LOWEST);
  const low = (seen.length ? Math.min(...seen) : 1e-6) / 2;
  const layers = names.map((one) => one.split(",")[0]);
  const begins = [...layers.keys()].filter((index) => layers[index] !== layers[index - 1]);
  return {
    title: `Drift along depth, slice ${slice}`, height: 300, unit: "relative error, logarithmic",
    text: `${names.length} boundaries in the order of execution.${marked < 0 ? "" : ` Marked: ${names[marked]}.`}`,
    data: [[...names.keys()], ...drawn.map(([, values]) => values.map((value) => (Number.isNaN(value) || !there(values) ? null : Math.max(value, low))))],
    scales: { x: { time: false, range: [-0.5, names.length - 0.5] }, y: { distr: 3, range: [low, 2 * (seen.length ? Math.max(...seen) : 1)] } },
    series: drawn.map(([said, values, tone, width, dash]) => line(there(values) ? said : `${said}: none`, tone, { width, dash })),
    axes: [{ splits: (plot) => spaced(begins, (90 * names.length) / plot.over.clientWidth), values: (_, at) => at.map((index) => layers[index]) }, {}],
    columns: ["boundary", ...drawn.map(([said]) => said)],
    rows: names.map((one, index) => [index, [one, ...drawn.map(([, values]) => number(Number.isNaN(values[index]) ? null : values[index]))]]),
    draw: (plot) => {
      if (marked < 0) return;
      const [x, width] = [plot.valToPos(marked, "x"), plot.over.clientWidth];
      stroke(plot, x, "text");
      label(plot, names[marked], x, -5, { align: x > 0.8 * width ? "right" : x < 0.2 * width ? "left" : "center", name: "fail" });
    },
  };
}

/** Those that lie so far apart or more. */
const spaced = (places, apart) => places.reduce((found, at) => (found.length && at - found.at(-1) < apart ? found : [...found, at]), []);
