// Charts of one moment: what was observed by size, drift along the responses, error along the depth of a model.

import { colour, label, line, stroke } from "./charts.js";
import { count, number, place, span } from "./format.js";

const { stepped: stairs } = uPlot.paths;
const ALIGNED = { paths: stairs({ align: 1 }) };
const unitOf = (unit) => (unit === "1" ? "" : unit.replace(/[{}]/g, ""));

/** A window's observations of a slice by size, against all traffic; null where nothing but zeros was observed. */
export function distributionChart(seen, slice, whole) {
  const { edges, above, below, total } = seen;
  if (!edges.length) return null;
  const compared = Boolean(whole?.edges.length);
  const signed = below.some(Boolean);
  const shares = (of, counts) => [...counts.map((many) => (100 * many) / of.total), 0];
  const marks = seen.marks.filter((mark) => mark.value > 0);
  const ends = [...edges, ...(compared ? whole.edges : []), ...marks.map((mark) => mark.value)];
  const data = uPlot.join([[edges, shares(seen, above), shares(seen, below)], ...(compared ? [[whole.edges, shares(whole, whole.above)]] : [])]);
  const zeros = seen.zero ? ` ${number((100 * seen.zero) / total)} % are zero, and not on the logarithmic axis.` : "";
  const share = (many) => (many ? `${count(many)} (${number((100 * many) / total)} %)` : "0");
  const [metric, unit] = [signed ? `size of ${seen.metric}` : seen.metric, unitOf(seen.unit)];
  return {
    title: `${metric} on ${place(slice)}`, data, height: 260, unit: "% of observations",
    text: `${count(total)} observations of ${seen.metric} in ${span(seen.window, 2)}: smallest ${number(seen.minimum)}, mean ${number(seen.mean)}, largest ${number(seen.maximum)}.${zeros}${compared ? " Dotted: all traffic." : ""}`,
    scales: { x: { time: false, distr: 3, range: [Math.min(...ends), Math.max(...ends)] }, y: { range: (_, low, high) => [0, 1.12 * high] } },
    series: [
      line(signed ? `${place(slice)}, above 0` : place(slice), "accent", { ...ALIGNED, fill: colour("band"), swatchFill: colour("band") }),
      line(signed && `${place(slice)}, below 0`, "open", { ...ALIGNED, width: signed ? 2 : 0, dash: [5, 3] }),
      ...(compared ? [line(signed ? "all traffic, above 0" : "all traffic", "quiet", { ...ALIGNED, width: 1.5, dash: [2, 3] })] : []),
    ],
    axes: [{ label: unit ? `${metric}, ${unit}` : metric, labelSize: 18 }, {}],
    lines: marks.map((mark) => [mark.value, mark.text]),
    columns: signed ? ["Size", `${place(slice)}, above 0`, "Below 0"] : ["Size", place(slice)],
    rows: above.map((many, index) => [Math.sqrt(edges[index] * edges[index + 1]), [`${number(edges[index])} to ${number(edges[index + 1])}`, share(many), ...(signed ? [share(below[index])] : [])]]),
  };
}

/** Drift by position and by turn, each with its interval; null without any. */
export function placesChart({ places, confidence }) {
  if (!places.length) return null;
  const level = `${Number((100 * confidence).toPrecision(4))} %`;
  const most = places.reduce((best, one) => (one.lower > best.lower ? one : best));
  return {
    title: "Drift by position and turn", height: 230, unit: "(1-w)+",
    text: `Mean of (1-w)+ over the tokens of a prompt that lie there, with the interval of ${level} by prompt of each. Below a bin of positions is its first token. Surely largest at ${most.text}: at least ${number(most.lower)}.`,
    data: [[...places.keys()], places.map((one) => one.estimate)],
    scales: { x: { time: false, range: [-0.5, places.length - 0.5] }, y: { range: [0, 1.05 * Math.max(...places.map((one) => one.upper)) || 1] } },
    series: [line(`interval of ${level}, mean`, "accent", { paths: () => null, points: { show: true, size: 8 } })],
    axes: [{ splits: () => [...places.keys()], values: () => places.map((one) => one.label) }, {}],
    columns: ["place", "mean", "at least", "at most", "prompts"],
    rows: places.map((one, index) => [index, [one.text, number(one.estimate), number(one.lower), number(one.upper), count(one.samples)]]),
    draw: (plot) => places.forEach((one, index) => stroke(plot, plot.valToPos(index, "x"), "accent", [], plot.valToPos(one.upper, "y"), plot.valToPos(one.lower, "y"))),
  };
}

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
