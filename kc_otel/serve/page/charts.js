// Charts: uPlot (vendored, uPlot.LICENSE) in the page's colours, with the values beside the pointer and as a table.
// A chart is {title, text, height, data, scales, series, bands, axes, columns, rows, marks, unit, draw}: of uPlot,
// and rows of [x, texts], marks of [x, text, sign] above the plot.

import { byId, el, fill } from "./dom.js";
import { number } from "./format.js";

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const NEAR = 12; // pixels within which marks are one, and the pointer is at a mark
const AXIS = 52; // pixels for the numbers on the left

const sizes = new ResizeObserver((seen) => {
  for (const { target, contentRect } of seen) if (contentRect.width) target.drawn?.setSize({ width: Math.floor(contentRect.width), height: target.drawn.height });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const node of document.querySelectorAll(".plot, .spark")) node.drawn?.redraw();
});

/** A colour of the palette, looked up at every drawing. */
export const colour = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A line of a chart; `more` is of uPlot's series. */
export const line = (label, name, more = {}) => ({ label, stroke: colour(name), width: 1.75, points: { show: false }, ...more });

/** The place of a chart, empty. */
export function figure(name, title, ...controls) {
  return el("figure", { class: "figure", "aria-labelledby": `${name}-title` },
    el("div", { class: "section-head" }, el("h3", { id: `${name}-title` }, title), controls),
    el("p", { id: `${name}-key`, class: "key", "aria-hidden": "true" }),
    el("div", { id: `${name}-chart`, class: "plot", role: "img", "aria-label": title }),
    el("figcaption", { id: `${name}-text`, class: "quiet" }, "Loading"),
    el("details", {}, el("summary", {}, "As a table"), el("div", { id: `${name}-table`, class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, as a table` })));
}

/** Show a chart in its figure; `empty` where there is none. */
export function showChart(name, chart, empty) {
  const plot = byId(`${name}-chart`);
  const details = byId(`${name}-table`).parentElement;
  byId(`${name}-text`).textContent = chart?.text ?? empty;
  details.hidden = plot.hidden = !chart;
  const values = el("div", { class: "values", hidden: true });
  if (!draw(plot, chart, { key: byId(`${name}-key`), values })) return; // its values and table stay as they are
  if (chart) plot.append(values);
  details.ontoggle = () => table(byId(`${name}-table`), details.open ? chart : null);
  details.ontoggle();
}

/** Draw a chart in a place, nothing for null; without key and values to be read at a glance. Whether it is a new one. */
export function draw(place, chart, { key, values } = {}) {
  const looks = JSON.stringify([chart?.title, chart?.data, chart?.rows, chart?.marks]);
  if (place.looks === looks) return false;
  const pointed = place.drawn?.cursor;
  place.drawn?.destroy();
  fill(place);
  if (key) fill(key);
  Object.assign(place, { looks, drawn: null });
  if (!chart) return true;
  place.setAttribute("aria-label", key ? chart.title : chart.text);
  const hooks = { draw: [(plot) => annotate(plot, chart, key)], setCursor: [(plot) => values && point(plot, chart, values)] };
  const nearest = (plot, left, top) => [left < 0 || !chart.rows.length ? left : plot.valToPos(rowAt(plot, chart, left)[0], "x"), top];
  place.drawn = new uPlot({
    class: "chart", width: place.clientWidth || 300, height: chart.height, scales: chart.scales, bands: chart.bands, hooks,
    series: [{}, ...chart.series.map((one) => ({
      ...one, dash: one.dash?.map((length) => length * uPlot.pxRatio), points: { ...one.points, stroke: one.stroke, fill: one.stroke },
    }))],
    axes: key ? chart.axes.map(axis) : [{ show: false }, { show: false }],
    padding: key ? [24, 28, 0, 0] : [1, 0, 1, 0], legend: { show: false },
    cursor: { show: Boolean(values), y: false, points: { show: false }, drag: { x: false, y: false }, move: nearest },
  }, chart.data, place);
  if (pointed?.left >= 0) place.drawn.setCursor(pointed);
  sizes.observe(place);
  return true;
}

const axis = (more, index) => ({
  stroke: colour("quiet"), font: `12px ${FONT}`, labelFont: `12px ${FONT}`, ticks: { show: false }, size: index ? AXIS : 28,
  grid: { show: Boolean(index), stroke: colour("line"), width: 1, filter: (plot, ticks) => (plot.scales.y.distr === 3 ? powers(ticks) : ticks) },
  values: (_, ticks) => ticks.map((value) => (value === null ? "" : number(value))), ...more,
});

/** Of ticks of equal ratios the powers of ten, or all where there is none. */
function powers(ticks) {
  const whole = (value) => Number.isInteger(Number(Math.log10(value).toFixed(9)));
  return ticks.some(whole) ? ticks.map((value) => (whole(value) ? value : null)) : ticks;
}

/** What stands in and above a plot: the unit, marks, and a chart's own; then the key, in the same colours. */
function annotate(plot, chart, key) {
  if (key && chart.unit) label(plot, chart.unit, 0, -14);
  for (const [x, , sign] of together(plot, chart.marks ?? [])) {
    stroke(plot, x, "quiet", [3, 3], key ? -4 : 0);
    if (key) label(plot, sign, x, -10, { align: "center", name: "text" });
    else label(plot, sign, Math.max(x - 4, 14), 12, { align: "right", name: "text" });
  }
  chart.draw?.(plot);
  if (key) fill(key, chart.series.filter((one) => one.label).map((one) => el("span", {}, swatch(one), one.label)));
}

/** Marks by their place in pixels; those that would cover each other are one. */
function together(plot, marks) {
  const found = [];
  for (const [value, text, sign] of marks.toSorted((a, b) => a[0] - b[0])) {
    const x = plot.valToPos(value, "x");
    if (found.length && x - found.at(-1)[0] < NEAR) found.at(-1)[1].add(text);
    else found.push([x, new Set([text]), sign]);
  }
  return found;
}

/** A text in a plot: place in pixels from its upper left corner. */
export function label(plot, text, x, y, { align = "left", name = "quiet", size = 12 } = {}) {
  inside(plot, ({ ctx }) => {
    Object.assign(ctx, { font: `${size}px ${FONT}`, textAlign: align, textBaseline: "alphabetic", lineWidth: 3, strokeStyle: colour("card")(), fillStyle: colour(name)() });
    ctx.strokeText(text, x, y);
    ctx.fillText(text, x, y);
  });
}

/** A line from the top of a plot to its bottom, or from `top` to `bottom`, in pixels. */
export function stroke(plot, x, name, dash = [], top = 0, bottom = plot.over.clientHeight) {
  inside(plot, ({ ctx }) => {
    ctx.setLineDash(dash);
    Object.assign(ctx, { strokeStyle: colour(name)(), lineWidth: name === "fail" ? 1.5 : 1 });
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, bottom);
    ctx.stroke();
  });
}

/** Draw in pixels of the page, from the plot's upper left corner. */
export function inside(plot, drawing) {
  plot.ctx.save();
  plot.ctx.translate(plot.bbox.left, plot.bbox.top);
  plot.ctx.scale(uPlot.pxRatio, uPlot.pxRatio);
  drawing(plot);
  plot.ctx.restore();
}

function swatch({ stroke: of, dash = [], width, swatchFill }) {
  const node = el("canvas", { class: "swatch", width: 24 * uPlot.pxRatio, height: 12 * uPlot.pxRatio });
  const ctx = node.getContext("2d");
  ctx.scale(uPlot.pxRatio, uPlot.pxRatio);
  if (swatchFill) {
    ctx.fillStyle = swatchFill();
    ctx.fillRect(0, 1, 24, 10);
  }
  ctx.setLineDash(dash);
  Object.assign(ctx, { strokeStyle: of(), lineWidth: width });
  ctx.beginPath();
  ctx.moveTo(0, 6);
  ctx.lineTo(24, 6);
  ctx.stroke();
  return node;
}

const rowAt = (plot, { rows }, left) => rows.reduce((best, one) => {
  const [near, far] = [one, best].map(([x]) => Math.abs(plot.valToPos(x, "x") - left));
  return near < far ? one : best;
});

/** The values of the row at the pointer, and the marks there. */
function point(plot, chart, values) {
  const { left } = plot.cursor;
  values.hidden = left < 0 || !chart.rows.length;
  if (values.hidden) return;
  const [, texts] = rowAt(plot, chart, left);
  fill(values,
    el("dl", {}, chart.columns.map((name, index) => [el("dt", {}, name), el("dd", {}, texts[index])])),
    together(plot, chart.marks ?? []).filter(([x]) => Math.abs(x - left) < NEAR).map(([, said]) => el("p", {}, [...said].join("; "))));
  const at = plot.over.offsetLeft + left;
  const before = left > plot.over.clientWidth / 2;
  values.style.left = before ? "auto" : `${at + 12}px`;
  values.style.right = before ? `${plot.width - at + 12}px` : "auto";
}

function table(node, chart) {
  fill(node, chart && el("table", {},
    el("thead", {}, el("tr", {}, chart.columns.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, chart.rows.toReversed().map(([, [first, ...rest]]) => el("tr", {}, el("th", { scope: "row" }, first), rest.map((value) => el("td", {}, value)))))));
}
