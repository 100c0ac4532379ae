// Charts of a cell, drawn by the evaluator: put in place, with the values below the pointer, and as a table.

import { byId, el, fill, svg } from "./dom.js";

const NEAR = 12; // thousandths of the width within which a mark is pointed at

/** The place of a chart, empty. */
export function figure(name, title, ...controls) {
  return el("figure", { class: "figure", "aria-labelledby": `${name}-title` },
    el("div", { class: "section-head" }, el("h3", { id: `${name}-title` }, title), controls),
    el("p", { id: `${name}-key`, class: "key", "aria-hidden": "true" }),
    el("div", { id: `${name}-chart`, class: "plot" }),
    el("figcaption", { id: `${name}-text`, class: "quiet" }, "Loading"),
    el("details", {}, el("summary", {}, "As a table"), el("div", { id: `${name}-table`, class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, as a table` })));
}

/** Show a chart as the API gives it; `empty` where there is none. */
export function showChart(name, chart, empty) {
  const plot = byId(`${name}-chart`);
  byId(`${name}-text`).textContent = chart?.text ?? empty;
  if (plot.chart?.svg === chart?.svg) return;
  fill(byId(`${name}-key`), (chart?.key ?? []).map(([sign, text]) => el("span", {}, svg(sign), text)));
  fill(plot);
  plot.hidden = !chart;
  plot.chart = chart;
  const details = byId(`${name}-table`).parentElement;
  details.hidden = !chart;
  details.ontoggle = () => table(byId(`${name}-table`), details.open ? chart : null);
  details.ontoggle();
  if (!chart) return;
  plot.append(svg(chart.svg), el("div", { class: "cross", hidden: true }), el("div", { class: "values", hidden: true }));
  if (plot.pointed !== undefined) point(plot, plot.pointed);
  plot.onpointermove = plot.onpointerdown = (event) => {
    const box = plot.firstChild.getBoundingClientRect();
    point(plot, (1000 * (event.clientX - box.left)) / box.width);
  };
  plot.onpointerleave = () => point(plot, undefined);
}

/** The values of the row that is nearest to a place, beside a line through it. */
function point(plot, at) {
  plot.pointed = at;
  const { rows, columns, marks } = plot.chart;
  const [drawing, cross, values] = plot.children;
  cross.hidden = values.hidden = at === undefined || !rows.length;
  if (cross.hidden) return;
  const row = rows.reduce((best, one) => (Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best));
  const left = drawing.getBoundingClientRect().left - plot.getBoundingClientRect().left + (drawing.getBoundingClientRect().width * row[0]) / 1000;
  cross.style.left = `${left}px`;
  fill(values,
    el("dl", {}, columns.map((name, index) => [el("dt", {}, name), el("dd", {}, row[1][index])])),
    marks.filter(([place]) => Math.abs(place - at) < NEAR).map(([, text]) => el("p", {}, text)));
  values.style.left = row[0] < 500 ? `${left + 12}px` : "auto";
  values.style.right = row[0] < 500 ? "auto" : `${plot.clientWidth - left + 12}px`;
}

function table(node, chart) {
  fill(node, chart && el("table", {},
    el("thead", {}, el("tr", {}, chart.columns.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, chart.rows.toReversed().map(([, [first, ...rest]]) => el("tr", {}, el("th", { scope: "row" }, first), rest.map((value) => el("td", {}, value)))))));
}
