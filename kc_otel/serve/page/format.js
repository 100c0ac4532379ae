// Numbers, times and states in words.

export const STATES = {
  FAIL: { rank: 0, shape: "✕", word: "Fail", tone: "fail", means: "above its limit" },
  INVALID_INPUT: { rank: 1, shape: "⊘", word: "Invalid input", tone: "silent", means: "the sides do not score the same tokens" },
  NO_DATA: { rank: 2, shape: "○", word: "No data", tone: "silent", means: "no observation" },
  INCONCLUSIVE: { rank: 3, shape: "?", word: "Inconclusive", tone: "open", means: "needs more samples" },
  PASS: { rank: 4, shape: "✓", word: "Pass", tone: "pass", means: "within its limit" },
};
const NO_TRAFFIC = { ...STATES.NO_DATA, shape: "–", word: "No traffic", means: "its requests are routed elsewhere" };
const ENDED = { ...STATES.NO_DATA, word: "Ended", means: "its recorder shut down cleanly" };
export const LEGEND = [...Object.values(STATES), NO_TRAFFIC, ENDED];

/** How a verdict is shown. */
export const stateOf = (verdict) => (verdict.no_traffic ? NO_TRAFFIC : verdict.reason.startsWith("the run ended") ? ENDED : STATES[verdict.status]);
export const CODES = ["PASS", "INCONCLUSIVE", "NO_DATA", "FAIL", "INVALID_INPUT"];

/** Three significant digits; a dash for what is not known. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(3)));
}

export const count = (value) => value.toLocaleString("en-US");

/** The reader's time zone. */
export const ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone;

/** A span of time in its largest unit, or two of them. */
export function span(seconds, units = 1) {
  let left = Math.max(0, Math.round(seconds));
  const parts = [];
  for (const [name, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    const many = Math.floor(left / size);
    left -= many * size;
    if (many || (name === "s" && !parts.length)) parts.push(`${many} ${name}`);
    else if (parts.length) break;
  }
  return parts.slice(0, units).join(" ");
}

/** A moment: the time of day today, with the date before. */
export function clock(at) {
  const moment = new Date(at * 1000);
  const time = moment.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  if (moment.toDateString() === new Date().toDateString()) return time;
  return `${moment.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}`;
}

export const iso = (at) => new Date(at * 1000).toISOString();
export const place = (slice) => (slice === "all" ? "all traffic" : slice);

/** How much of the limit is used by the bound that decides, as a short text. */
export function share(verdict) {
  const bound = verdict.status === "FAIL" ? verdict.lower : verdict.upper;
  if (bound === null || !(verdict.limit > 0)) return "";
  const times = bound / verdict.limit;
  if (times > 1.05) return times >= 100 ? ">99×" : `${Number(times.toPrecision(2))}×`;
  // Never rounded to the limit's other side.
  return `${times > 1 ? Math.ceil(times * 100) : Math.floor(times * 100)} %`;
}

const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

const LATE = 30; // seconds: what is older is not of now, as /readyz has it

/** Seconds since anything was judged, where that is too long; else 0. */
export function lateness(overview) {
  const age = overview ? overview.now - (overview.at ?? overview.started_at) : 0;
  return age > LATE ? age : 0;
}

/** What an undecided cell lacks, in a few words: its reason ends with it. */
export function missing({ reason }) {
  const more = /([\d,]+) more needed$/.exec(reason);
  if (more) return `${COMPACT.format(Number(more[1].replaceAll(",", "")))} more`;
  const alarm = /: (\d+ %) of what an alarm takes$/.exec(reason);
  return alarm ? `${alarm[1]} of an alarm` : "";
}

/** What orders cells: state first, then how far the deciding bound is beyond its limit. */
export function badness(verdict) {
  const bound = verdict.status === "FAIL" ? verdict.lower : verdict.upper;
  const times = bound === null || !(verdict.limit > 0) ? 0 : bound / verdict.limit;
  return (3 - STATES[verdict.status].rank) * 1e6 + Math.min(times, 1e5);
}

export const address = (verdict) =>
  "#/cell/" +
  ["contract", "clause", "slice", "kernel_train", "kernel_inference"]
    .map((name) => encodeURIComponent(verdict[name]))
    .join("/");

const DONE = {
  notify: "announced in the log",
  route: "routing to the training kernel ordered",
  "sample-more": "recorders asked to sample more",
  locate: "machines asked to locate the operator",
  "hold-promotion": "promotion of this version held",
  "quarantine-rollouts": "trainers asked to quarantine rollouts",
  "resync-weights": "trainers asked to send the weights again",
  halt: "trainers asked to halt",
};

/** An action, as a contract writes it (`notify`, or `{webhook: pager}`), in words. */
export function action(one) {
  const [kind, target] = typeof one === "string" ? [one] : Object.entries(one)[0];
  return kind === "webhook" ? `webhook to ${target} due` : (DONE[kind] ?? kind);
}

/** Words as an enumeration, cut where it gets long. */
export function listed(words, most = 6) {
  if (words.length > most) return `${words.slice(0, most).join(", ")} and ${words.length - most} more`;
  return words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words.at(-1)}` : (words[0] ?? "");
}

/** A kernel version spelled out, as far as it reported itself. */
export function kernel(contract, role, version) {
  if (!version) return "not seen yet";
  return contract?.kernels.find((one) => one.role === role && one.version === version)?.name ?? version;
}
