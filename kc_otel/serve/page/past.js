// The past of a cell as charts: its estimate with the confidence interval against its limit, its verdicts, what
// happened, and the evidence against it.

import { colour, inside, label, line } from "./charts.js";
import { KINDS, PERSON } from "./events.js";
import { CODES, STATES, clock, count, number, span } from "./format.js";

const GAP = 3.5; // times the usual distance of two evaluations, beyond which nobody looked in between
const LOGARITHMIC = 30; // between estimate and limit: on a linear axis one of both would lie at its end
const STRIP = 14; // pixels of the verdicts below the plot
const FAIL = CODES.indexOf("FAIL");
const [AT, ESTIMATE, LOWER, UPPER, LIMIT, SAMPLES, STATUS, EVIDENCE, STEP] = Array(9).keys(); // of a point
const { stepped: stairs } = uPlot.paths;

const known = (point) => point[ESTIMATE] !== null;
const failing = (point) => known(point) && point[STATUS] >= FAIL;

/** The points of a cell and of the same clause and slice with other kernels, over `time` or `step`. */
export function pastOf({ series, step }, { kernel_train, kernel_inference }, over = "time") {
  const usable = (points) => (over === "time" ? points : points.filter((point) => point[STEP] !== null));
  const mine = (one) => one.kernel_train === kernel_train && one.kernel_inference === kernel_inference;
  const own = usable(series.find(mine)?.points ?? []);
  const others = series.filter((one) => !mine(one)).map((one) => ({ kernel: one.kernel_inference, points: usable(one.points) })).filter((one) => one.points.some(known));
  const every = [...own, ...others.flatMap((one) => one.points)].sort((a, b) => a[AT] - b[AT]);
  return { own, others, every, over, kernel: kernel_inference, gap: GAP * step, x: (point) => point[over === "time" ? AT : STEP] };
}

/** Alerts of a clause on a slice, what people did to it, and steps of promotions, as [Unix time, text, sign]. */
export function marksOf(events, { contract, clause, slice }) {
  const own = ({ kind, data }) => (kind === "promotion" ? true : kind in KINDS ? data.clause === clause && data.slice === slice : data.by && [undefined, null, clause].includes(data.clause) && [undefined, null, slice].includes(data.slice));
  return events.filter((event) => event.contract === contract && event.kind !== "verdict" && own(event)).map((event) => [event.at, `${event.kind.replaceAll("-", " ")}: ${event.message.replace(`${contract}: `, "")}`, (KINDS[event.kind] ?? PERSON)[0]]);
}

/** The chart of a past; null where nothing was judged in it. A small one has neither axes nor signs below it. */
export function historyChart(past, { title, unit = "", events = [], small = false }) {
  const { own, others, every, over } = past;
  if (!(small ? own : every).length) return null;
  const { log, range: [low, high] } = valueScale(every);
  const held = (value, open) => Math.min(Math.max(value ?? open, low), high);
  const bound = (index, open) => (point) => (known(point) && (point[LOWER] !== null || point[UPPER] !== null) ? held(point[index], open) : null);
  const estimate = (point) => (known(point) ? held(point[ESTIMATE]) : null);
  const columns = [bound(UPPER, high), bound(LOWER, low), estimate, (point) => (failing(point) ? held(point[ESTIMATE]) : null)];
  const data = uPlot.join([
    curves(past, own, columns), curves({ ...past, gap: Infinity }, every, [(point) => held(point[LIMIT])]),
    ...others.map((one) => curves(past, one.points, [estimate])),
  ]);
  const few = { points: { show: !small && own.length <= 40, size: 7, space: 0 } };
  const edge = { width: 0, points: { show: false } };
  const begun = [{ kernel: past.kernel, points: own }, ...others].filter((one) => one.kernel && one.points.length && one.points[0] !== every[0]).map((one) => [one.points[0][AT], `kernel ${one.kernel} is judged first`, "◆"]);
  const [first, last] = [every[0][AT], every.at(-1)[AT]];
  const marks = [...events, ...(small ? [] : begun)].filter(([at]) => first <= at && at <= last).map(([at, ...said]) => [placeOf(past, at), ...said]);
  const stepped = own.some((point) => point[STEP] !== null);
  const more = others.length > 1 ? ` and ${others.length - 1} more` : "";
  return {
    title, data, marks, height: small ? 48 : 266, text: textOf(past) + (small ? marks.map(([, said]) => ` ${said}.`).join("") : ""),
    scales: { x: across(past), y: { distr: log ? 3 : 1, range: [low, high] } }, unit: [unit, log ? "logarithmic" : ""].filter(Boolean).join(", "),
    series: [
      edge, edge,
      line(own.some(known) && "estimate with its confidence interval", "accent", { ...few, swatchFill: colour("band") }),
      line(own.some(failing) && "where it fails", "fail", { width: 2.25, ...few }),
      line("limit", "fail", { width: 1.5, dash: [6, 4], paths: stairs({ align: 1 }), fill: colour("beyond"), fillTo: () => high }),
      ...others.map((one, index) => line(index ? "" : `kernel ${one.kernel || "not seen yet"}${more}`, "quiet", { width: 1.5, dash: [2, 3] })),
    ],
    bands: [{ series: [1, 2], fill: colour("band") }],
    axes: [{ ...timesOf(over), size: 28 + STRIP, gap: 5 + STRIP }, {}],
    columns: ["Time", "Verdict", "Estimate", "Interval", "Limit", "Samples", ...(stepped ? ["Step"] : [])],
    rows: own.map((point) => [past.x(point), [
      clock(point[AT]), verdict(point), number(point[ESTIMATE]), interval(point), number(point[LIMIT]), count(point[SAMPLES]),
      ...(stepped ? [point[STEP] === null ? "–" : count(point[STEP])] : []),
    ]]),
    draw: (plot) => {
      if (small) return;
      strip(plot, past);
      const y = plot.valToPos(held(every.at(-1)[LIMIT]), "y");
      const of = plot.valToPos(held(own.findLast(known)?.[ESTIMATE], low), "y");
      label(plot, `limit ${number(every.at(-1)[LIMIT])}`, plot.over.clientWidth, y + (y > of && y - of < 18 ? 14 : -5), { align: "right", name: "fail" });
    },
  };
}

/** The chart of the evidence against a cell as a share of an alarm; null if there was never any. */
export function evidenceChart(past, title) {
  const seen = past.own.filter((point) => point[EVIDENCE] !== null);
  if (!seen.length) return null;
  const share = (point) => (point[EVIDENCE] === null ? null : 100 * Math.min(Math.max(point[EVIDENCE], 0), 1));
  const said = (point) => (point[EVIDENCE] === null ? "–" : `${Math.floor(share(point))} %`);
  const [last, most] = [seen.at(-1), seen.reduce((best, one) => (share(one) > share(best) ? one : best))];
  const highest = share(most) === share(last) ? "" : `, ${said(most)} at its highest, at ${clock(most[AT])}`;
  const few = { points: { show: past.own.length <= 40, size: 7, space: 0 } };
  return {
    title, height: 130, unit: "% of an alarm", marks: [],
    text: `Evidence that the limit is broken: ${said(last)} of an alarm at ${clock(last[AT])}${highest}. FAIL begins at an alarm, and ends when later observations pass or no evidence is left.`,
    data: uPlot.join([curves(past, past.own, [share, (point) => (point[STATUS] >= FAIL ? share(point) : null)]), curves({ ...past, gap: Infinity }, past.every, [() => 100])]),
    scales: { x: across(past), y: { range: [0, 115] } },
    series: [line("evidence that the limit is broken", "accent", few), line("", "fail", { width: 2.25, ...few }), line("alarm: FAIL begins", "fail", { width: 1.5, dash: [6, 4], fill: colour("beyond"), fillTo: () => 115 })],
    axes: [timesOf(past.over), { splits: () => [0, 50, 100] }],
    columns: ["Time", "Verdict", "Evidence"],
    rows: past.own.map((point) => [past.x(point), [clock(point[AT]), verdict(point), said(point)]]),
    draw: (plot) => label(plot, "alarm", plot.over.clientWidth, plot.valToPos(100, "y") - 5, { align: "right", name: "fail" }),
  };
}

/** Columns of points by place, ascending, broken where nobody looked; of several at one step the one that fails is drawn. */
function curves({ x, gap }, points, columns) {
  const rows = new Map();
  points.forEach((point, index) => {
    const before = points[index - 1];
    if (before && point[AT] - before[AT] > gap) rows.set((x(before) + x(point)) / 2, null);
    if (!failing(rows.get(x(point)) ?? [0, null])) rows.set(x(point), point);
  });
  const sorted = [...rows].sort(([a], [b]) => a - b);
  return [sorted.map(([at]) => at), ...columns.map((column) => sorted.map(([, point]) => (point ? column(point) : null)))];
}

/** Limit and estimates in sight: an axis of equal ratios where they are orders of magnitude apart. */
function valueScale(every) {
  const limit = Math.max(...every.map((point) => point[LIMIT]));
  const estimates = every.filter(known).map((point) => point[ESTIMATE]);
  const [least, largest] = estimates.length ? [Math.min(...estimates), Math.max(...estimates)] : [0, 0];
  if (Math.min(least, limit) > 0 && (largest > LOGARITHMIC * limit || limit > LOGARITHMIC * largest)) {
    const [low, high] = [Math.min(least, limit), Math.max(largest, limit)];
    return { log: true, range: [10 ** Math.floor(Math.log10(Math.max(low, high * 1e-9) / 1.2)), 3 * high] };
  }
  const [lower, upper] = [Math.min(0, ...every.map((point) => point[LOWER])), Math.max(0, ...every.map((point) => point[UPPER]))];
  const high = Math.max(1.25 * limit, 1.15 * largest, Math.min(1.05 * upper, 3 * Math.max(largest, limit)));
  const low = Math.min(0, 1.15 * least, Math.max(1.05 * lower, Math.min(least, -limit)));
  return { log: false, range: [low, high > low ? high : low + 1] };
}

function across({ every, x, over }) {
  const places = every.map(x);
  const [low, high] = [Math.min(...places), Math.max(...places)];
  return { time: over === "time", range: low < high ? [low, high] : [low - 30, high + 30] };
}

/** The place of a moment; over steps, between those before and after. */
function placeOf({ every, x, over }, at) {
  const next = every.findIndex((point) => point[AT] >= at);
  const [before, after] = [every[Math.max(next - 1, 0)], every[next]];
  if (over === "time" || before[AT] === after[AT]) return over === "time" ? at : x(after);
  return x(before) + ((at - before[AT]) / (after[AT] - before[AT])) * (x(after) - x(before));
}

/** The labels of an axis of moments: the time of day, and the date where a day begins; of steps, whole numbers. */
function timesOf(over) {
  if (over === "step") return { values: (_, steps) => steps.map(count), incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] };
  const said = (at, step) => {
    const moment = new Date(at * 1000);
    if (!(moment.getHours() || moment.getMinutes() || moment.getSeconds())) return moment.toLocaleDateString([], { month: "short", day: "numeric" });
    return moment.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: step < 60 ? "2-digit" : undefined, hourCycle: "h23" });
  };
  return { space: 70, values: (_, moments, axis, space, step) => moments.map((at) => said(at, step)) };
}

/** Equal verdicts in a row, each up to the next evaluation if that came in time. */
function spans(points, gap) {
  const found = [];
  points.forEach((from, index) => {
    const next = points[index + 1];
    const to = next && next[AT] - from[AT] <= gap ? next : from;
    const last = found.at(-1);
    if (last?.to === from && last.code === from[STATUS]) last.to = to;
    else found.push({ code: from[STATUS], from, to });
  });
  return found;
}

/** The verdicts below the plot: a colour, and a shape where there is room for it. */
function strip(plot, { own, gap, x }) {
  const [width, top] = [plot.over.clientWidth, plot.over.clientHeight + 2];
  for (const { code, from, to } of spans(own, gap)) {
    const { tone, shape } = STATES[CODES[code]];
    const [start, end] = [from, to].map((point) => plot.valToPos(x(point), "x"));
    const wide = Math.max(end - start, 4);
    const left = Math.min(start, width - wide);
    inside(plot, ({ ctx }) => {
      ctx.fillStyle = colour(`${tone}-line`)();
      ctx.fillRect(left, top, wide, STRIP - 2);
    });
    if (wide >= 20) label(plot, shape, left + wide / 2, top + STRIP - 4, { align: "center", name: tone, size: 10 });
  }
}

/** A past in sentences. */
export function textOf({ own, others, gap }) {
  const seen = own.filter(known);
  if (!seen.length) return "No evaluation with data is remembered for this pair of kernels.";
  const [estimates, first, last] = [seen.map((point) => point[ESTIMATE]), seen[0], seen.at(-1)];
  const failed = spans(own, gap).filter(({ code }) => code === FAIL);
  const seconds = failed.reduce((sum, { from, to }) => sum + to[AT] - from[AT], 0);
  return [
    `Estimate ${number(Math.min(...estimates))} to ${number(Math.max(...estimates))} over ${span(last[AT] - first[AT], 2)} until ${clock(last[AT])}, last ${number(last[ESTIMATE])} with the limit at ${number(last[LIMIT])}.`,
    !failed.length ? "Never FAIL in that time." : seconds ? `FAIL for ${span(seconds, 2)} of it, first at ${clock(failed[0].from[AT])}.` : `FAIL at ${clock(failed.at(-1).from[AT])}.`,
    others.length ? `${others.length} other kernel ${others.length === 1 ? "version" : "versions"} on the same slice.` : "",
  ].filter(Boolean).join(" ");
}

const verdict = (point) => `${STATES[CODES[point[STATUS]]].shape} ${CODES[point[STATUS]]}`;
const interval = (point) => (point[LOWER] === null && point[UPPER] === null ? "–" : [point[LOWER], point[UPPER]].map((side) => (side === null ? "unbounded" : number(side))).join(" to "));
