// Charts of one cell, drawn by plotly.js, which is loaded when the first of them is needed. Every chart has its text and
// its table beside it; where plotly is not installed these are all there is.

import { byId, el, fill } from "./dom.js";
import { CODES, clock, count, number, span } from "./format.js";

const drawn = new Map();
let loading = null;

function plotly() {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  const version = document.querySelector('meta[name="kc-plotly"]').content;
  if (!version) return Promise.resolve(null);
  loading ??= new Promise((resolve) => {
    const script = el("script", { src: `/page/plotly/${encodeURIComponent(version)}` });
    script.onload = () => resolve(window.Plotly ?? null);
    script.onerror = () => resolve(null);
    document.head.append(script);
  });
  return loading;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function layout(more) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), tickfont: { color: colour("quiet"), size: 12 }, fixedrange: true, automargin: true };
  return {
    font: { family: "system-ui, sans-serif", size: 12, color: colour("text") },
    paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    margin: { l: 48, r: 12, t: 8, b: 36 },
    showlegend: false,
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text") } },
    hovermode: "x unified",
    ...more,
    xaxis: { ...axis, ...more.xaxis },
    yaxis: { ...axis, rangemode: "tozero", ...more.yaxis },
  };
}

async function draw(id, traces, more) {
  const Plotly = await plotly();
  const node = byId(id);
  if (!node) return;
  if (!Plotly) {
    node.hidden = true;
    return;
  }
  drawn.set(id, [traces, more]);
  const made = traces();
  const looks = layout(more());
  fill(byId(id.replace("-chart", "-key")), made.map(key));
  await Plotly.react(node, made, looks, { displayModeBar: false, responsive: true });
}

/** A line of the legend: it wraps where plotly's own would take the chart's place on a phone. */
function key({ name, line, fillcolor }) {
  const swatch = el("span", { class: "swatch", "aria-hidden": "true" });
  if (fillcolor) swatch.style.background = fillcolor;
  if (line.width) swatch.style.borderTop = `2px ${{ dot: "dotted", dash: "dashed" }[line.dash] ?? "solid"} ${line.color}`;
  return el("span", {}, swatch, name.replaceAll("&lt;", "<").replaceAll("&amp;", "&"));
}

/** Free what the charts of a closed cell hold. */
export function forget() {
  for (const id of drawn.keys()) {
    const node = byId(id);
    if (node && window.Plotly) window.Plotly.purge(node);
  }
  drawn.clear();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [id, [traces, more]] of drawn) draw(id, traces, more);
});

/** Runs of points with a confidence band, as closed outlines. */
function band(points) {
  const xs = [];
  const ys = [];
  let run = [];
  const close = () => {
    if (run.length > 1) {
      xs.push(...run.map((p) => new Date(p[0] * 1000)), ...run.toReversed().map((p) => new Date(p[0] * 1000)), null);
      ys.push(...run.map((p) => p[3]), ...run.toReversed().map((p) => p[2]), null);
    }
    run = [];
  };
  for (const point of points) {
    if (point[2] === null || point[3] === null) close();
    else run.push(point);
  }
  close();
  return { xs, ys };
}

function highest(points) {
  const limit = Math.max(...points.map((p) => p[4]));
  const estimate = Math.max(...points.map((p) => p[1] ?? 0));
  const upper = Math.max(...points.map((p) => p[3] ?? 0));
  return Math.max(1.25 * limit, 1.15 * estimate, Math.min(1.05 * upper, 3 * Math.max(estimate, limit)));
}

export async function drawHistory(history, cell) {
  const mine = history.series.find((one) => one.kernel_inference === cell.kernel_inference && one.kernel_train === cell.kernel_train);
  const others = history.series.filter((one) => one !== mine && one.points.some((p) => p[1] !== null));
  const all = history.series.flatMap((one) => one.points).sort((a, b) => a[0] - b[0]);
  historyText(mine?.points ?? [], others, cell);
  if (!all.length) {
    byId("history-chart").hidden = true;
    return;
  }
  const times = (points) => points.map((p) => new Date(p[0] * 1000));
  const traces = () => {
    const made = [];
    for (const other of others) made.push({
      x: times(other.points), y: other.points.map((p) => p[1]), name: escaped(`kernel ${other.kernel_inference || "none"}`), mode: "lines",
      line: { color: colour("quiet"), width: 1.5, dash: "dot" }, hovertemplate: "%{y:.3g}",
    });
    if (mine) {
      const { xs, ys } = band(mine.points);
      made.push({ x: xs, y: ys, name: "confidence band", fill: "toself", fillcolor: colour("band"), mode: "lines", line: { width: 0 }, hoverinfo: "skip" });
      made.push({ x: times(mine.points), y: mine.points.map((p) => p[1]), name: "estimate", mode: "lines", line: { color: colour("accent"), width: 2 }, hovertemplate: "%{y:.3g}" });
      if (mine.points.some((p) => CODES[p[6]] === "FAIL")) made.push({
        x: times(mine.points), y: mine.points.map((p) => (CODES[p[6]] === "FAIL" ? p[1] : null)), name: "estimate, where it fails", mode: "lines+markers",
        line: { color: colour("fail"), width: 2.5 }, marker: { symbol: "x", size: 7, color: colour("fail"), maxdisplayed: 14 }, hoverinfo: "skip",
      });
    }
    made.push({ x: times(all), y: all.map((p) => p[4]), name: "limit", mode: "lines", line: { color: colour("fail"), width: 1.5, dash: "dash", shape: "hv" }, hovertemplate: "%{y:.3g}" });
    return made;
  };
  await draw("history-chart", traces, () => ({
    height: 230,
    yaxis: { range: [Math.min(0, ...all.map((p) => p[1] ?? 0)), highest(all)], title: cell.unit === "1" ? undefined : { text: cell.unit.replace(/[{}]/g, "") } },
  }));
}

function historyText(points, others, cell) {
  const known = points.filter((p) => p[1] !== null);
  if (!known.length) {
    byId("history-text").textContent = "No evaluation with data is remembered for this pair of kernels.";
    fill(byId("history-table"));
    return;
  }
  const estimates = known.map((p) => p[1]);
  const last = known.at(-1);
  const over = points.filter((p) => CODES[p[6]] === "FAIL").length;
  const parts = [
    `Estimate ${number(Math.min(...estimates))} to ${number(Math.max(...estimates))} over ${span(last[0] - known[0][0], 2)}, now ${number(last[1])} with the limit at ${number(last[4])}.`,
    over ? `${over} of ${points.length} evaluations shown are Fail.` : "No evaluation shown is Fail.",
  ];
  if (others.length) parts.push(`Dotted: ${others.length} other kernel ${others.length === 1 ? "version" : "versions"} on the same slice.`);
  byId("history-text").textContent = parts.join(" ");
  if (!byId("history-table").parentElement.open) {
    byId("history-table").parentElement.ontoggle = () => historyText(points, others, cell);
    return;
  }
  const every = Math.max(1, Math.ceil(points.length / 30));
  const chosen = points.filter((_, index) => (points.length - 1 - index) % every === 0).toReversed();
  fill(byId("history-table"), el("table", {},
    el("thead", {}, el("tr", {}, ["Time", "Verdict", "Estimate", "Lower", "Upper", "Limit", "Samples"].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, chosen.map((p) => el("tr", {}, el("th", { scope: "row" }, clock(p[0])), el("td", {}, CODES[p[6]]), ...[1, 2, 3, 4].map((i) => el("td", {}, number(p[i]))), el("td", {}, count(p[5])))))));
}

/** Shares per bin as the outline of a histogram. */
function outline(edges, counts, total) {
  const x = [];
  const y = [];
  counts.forEach((many, index) => {
    x.push(edges[index], edges[index + 1]);
    y.push((100 * many) / total, (100 * many) / total);
  });
  return { x: [x[0], ...x, x.at(-1)], y: [0, ...y, 0] };
}

export async function drawDistribution(own, whole, name) {
  distributionText(own, whole, name);
  if (!own.edges.length) {
    byId("distribution-chart").hidden = true;
    return;
  }
  byId("distribution-chart").hidden = false;
  const signed = own.below.some((many) => many > 0);
  const traces = () => {
    const made = [];
    if (whole?.edges.length) made.push({ ...outline(whole.edges, whole.above, whole.total), name: signed ? "all traffic, above 0" : "all traffic", mode: "lines", line: { color: colour("quiet"), width: 1.5, dash: "dot" }, hovertemplate: "%{y:.2g} %" });
    made.push({ ...outline(own.edges, own.above, own.total), name: escaped(signed ? `${name}, above 0` : name), mode: "lines", fill: "tozeroy", fillcolor: colour("band"), line: { color: colour("accent"), width: 2 }, hovertemplate: "%{y:.2g} %" });
    if (signed) made.push({ ...outline(own.edges, own.below, own.total), name: escaped(`${name}, below 0`), mode: "lines", line: { color: colour("open"), width: 2, dash: "dash" }, hovertemplate: "%{y:.2g} %" });
    return made;
  };
  await draw("distribution-chart", traces, () => ({
    height: 220,
    xaxis: { type: "log", title: { text: `${signed ? "size of " : ""}${escaped(own.metric)}${own.unit === "1" ? "" : `, ${own.unit.replace(/[{}]/g, "")}`}`, font: { color: colour("quiet"), size: 12 } }, tickfont: { color: colour("quiet"), size: 9.6 }, dtick: 1, exponentformat: "power" },
    yaxis: { ticksuffix: " %", range: [0, 1.2 * Math.max(...own.above, ...own.below) * (100 / own.total)] },
    shapes: own.marks.filter((one) => one.value > 0).map((one) => ({ type: "line", x0: one.value, x1: one.value, yref: "paper", y0: 0, y1: 1, line: { color: colour("fail"), width: 1.5, dash: "dash" } })),
    annotations: own.marks.filter((one) => one.value > 0).map((one) => ({ x: Math.log10(one.value), yref: "paper", y: 1, yanchor: "top", xanchor: Math.log10(one.value) > (Math.log10(own.edges[0]) + Math.log10(own.edges.at(-1))) / 2 ? "right" : "left", borderpad: 4, showarrow: false, text: escaped(one.text), bgcolor: colour("card"), font: { color: colour("fail"), size: 11 } })),
  }));
}

/** plotly reads a little markup in texts: names must not be any. */
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

function distributionText(own, whole, name) {
  const { total } = own;
  if (!total) {
    byId("distribution-text").textContent = `Nothing was observed in the last ${span(own.window, 2)}.`;
    fill(byId("distribution-table"));
    return;
  }
  const said = [`${count(total)} observations of ${own.metric} in ${span(own.window, 2)}: smallest ${number(own.minimum)}, mean ${number(own.mean)}, largest ${number(own.maximum)}.`];
  if (own.zero) said.push(`${number((100 * own.zero) / total)} % are zero, and not on the logarithmic axis.`);
  if (whole) said.push("Dotted: all traffic.");
  byId("distribution-text").textContent = said.join(" ");
  if (!byId("distribution-table").parentElement.open) {
    byId("distribution-table").parentElement.ontoggle = () => distributionText(own, whole, name);
    return;
  }
  fill(byId("distribution-table"), el("table", {},
    el("thead", {}, el("tr", {}, ["From", "To", `${name}, above 0`, "below 0"].map((one) => el("th", { scope: "col" }, one)))),
    el("tbody", {}, own.above.map((many, index) => el("tr", {}, el("th", { scope: "row" }, number(own.edges[index])), el("td", {}, number(own.edges[index + 1])), el("td", {}, count(many)), el("td", {}, count(own.below[index])))))));
}
