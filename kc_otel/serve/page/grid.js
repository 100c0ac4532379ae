// Clauses x slices: every cell's state as a shape, a word and a number, the worst slices first; those that pass fold.

import { byId, el, sync } from "./dom.js";
import { STATES, address, badness, count, missing, number, place, share, span, stateOf } from "./format.js";
import { runbook } from "./overview.js";

const AT_ONCE = 40; // rows that are made before somebody asks for the rest
const AT_ONCE_ON_A_PHONE = 12;
const PASSING = 8; // rows that pass which are shown unasked; on a phone none, when there are more than three

const phone = window.matchMedia("(max-width: 40rem)");
const wanted = new Set();
const ranked = new Map(); // how bad a row was when it got its status: rows do not change places under a reader's eyes

export function watchFilter(changed) {
  byId("query").addEventListener("input", changed);
  byId("only").addEventListener("change", changed);
  byId("filter").addEventListener("submit", (event) => event.preventDefault());
  byId("grids").addEventListener("click", (event) => {
    const contract = event.target.closest("[data-more]")?.dataset.more;
    if (contract === undefined) return;
    if (!wanted.delete(contract)) wanted.add(contract);
    changed();
  });
}

export function showGrids({ contracts, cells }) {
  byId("cells").hidden = !cells.length;
  const query = byId("query").value.trim().toLowerCase();
  const only = byId("only").checked;
  const by = new Map(contracts.map((contract) => [contract.name, []]));
  for (const cell of cells) by.get(cell.contract)?.push(cell);
  let shown = 0;
  let all = 0;
  const tables = [];
  for (const contract of contracts) {
    const rows = grouped(by.get(contract.name));
    const kept = rows.filter((row) => (!only || row.worst !== "PASS") && (!query || row.text.includes(query)));
    all += rows.length;
    shown += kept.length;
    tables.push({ contract, rows: kept });
  }
  byId("shown").textContent = shown === all ? "" : `${count(shown)} of ${count(all)} slices match.`;
  sync(byId("grids"), tables, (one) => one.contract.name, (one) => one.contract.hash, frame);
  for (const table of tables) {
    const node = [...byId("grids").children].find((one) => one.dataset.key === table.contract.name);
    const rows = node.querySelector("[data-rows]");
    const held = rows.contains(document.activeElement) ? document.activeElement.closest(".grid-row").dataset.key : null;
    const all = wanted.has(table.contract.name);
    const kept = all || query ? table.rows : unfolded(table.rows, held);
    sync(rows, kept, (row) => row.slice, (row) => row.mark, (row) => line(row, table.contract));
    const more = node.querySelector("[data-more]");
    more.hidden = !all && kept.length === table.rows.length;
    more.setAttribute("aria-expanded", String(all));
    more.textContent = all ? "Hide passing slices" : folded(table.rows.filter((row) => !kept.includes(row)));
  }
}

/** The rows that are shown unasked: what does not pass, traffic as a whole, and where somebody is. */
function unfolded(rows, held) {
  const passing = rows.filter((row) => row.worst === "PASS").length;
  const fold = passing > (phone.matches ? 3 : PASSING);
  let left = phone.matches ? AT_ONCE_ON_A_PHONE : AT_ONCE;
  return rows.filter((row) => {
    const asked = row.slice === held || row.slice === "all";
    if (fold && row.worst === "PASS" && !asked) return false;
    left -= 1;
    return asked || left >= 0;
  });
}

/** What a button says that brings rows back: "12 more slices and 57 that pass". */
function folded(rows) {
  const pass = rows.filter((row) => row.worst === "PASS").length;
  const more = rows.length - pass;
  const said = [more && `${count(more)} more ${more === 1 ? "slice" : "slices"}`, pass && `${count(pass)} ${more ? "that pass" : pass === 1 ? "slice passes" : "slices pass"}`];
  return `${said.filter(Boolean).join(" and ")}: show`;
}

/** Cells by slice, the worst slice first; traffic as a whole leads among equals. */
function grouped(cells) {
  const by = new Map();
  const versions = new Set(cells.map((verdict) => verdict.kernel_inference).filter(Boolean)).size;
  for (const verdict of cells) {
    if (!by.has(verdict.slice)) by.set(verdict.slice, []);
    by.get(verdict.slice).push(verdict);
  }
  const rows = [...by].map(([slice, verdicts]) => {
    const worst = verdicts.reduce((a, b) => (badness(b) > badness(a) ? b : a));
    return {
      slice, verdicts, versions,
      worst: worst.status,
      bad: steady(`${worst.contract}/${slice}`, worst),
      text: `${place(slice)} ${verdicts.map((one) => one.clause).join(" ")}`.toLowerCase(),
      mark: versions + verdicts.map((one) => `${one.clause}${one.kernel_inference}${one.kernel_train}${stateOf(one).word}${used(one)}`).join("|"),
    };
  });
  const rank = (row) => STATES[row.worst].rank;
  return rows.sort((a, b) => rank(a) - rank(b) || (b.slice === "all") - (a.slice === "all") || b.bad - a.bad || a.slice.localeCompare(b.slice));
}

function steady(row, worst) {
  if (ranked.get(row)?.status !== worst.status) ranked.set(row, { status: worst.status, bad: badness(worst) });
  return ranked.get(row).bad;
}

/** What a reader has to know of a contract to read its table. */
function terms(contract) {
  const parts = [
    `judged over ${span(contract.window, 2)} and ${span(contract.long_window, 2)}`,
    `${Number((contract.confidence * 100).toPrecision(4))} % confidence`,
    contract.owner && `owner ${contract.owner}`,
    runbook(contract),
    el("code", { title: "Hash of the contract in force" }, contract.hash.slice(0, 12)),
  ].filter(Boolean);
  return parts.flatMap((part, index) => (index ? [" · ", part] : [part]));
}

function frame({ contract }) {
  const title = `grid-${contract.name}`;
  const box = el("div", { class: "grid-box" },
    el("h3", { id: title }, `${contract.name} v${contract.version}`, contract.description && el("span", { class: "quiet" }, ` ${contract.description}`)),
    el("p", { class: "terms" }, terms(contract)),
    el("div", { class: "grid", role: "table", "aria-labelledby": title },
      el("div", { class: "grid-row head", role: "row" },
        el("span", { role: "columnheader" }, "Slice"),
        contract.clauses.map((clause) => el("span", { role: "columnheader", title: clause.meaning },
          clause.id, el("small", {}, `${clause.statistic} ${clause.metric} ≤ ${number(clause.limit)}`)))),
      el("div", { role: "rowgroup", class: "rows", "data-rows": true })),
    el("button", { type: "button", class: "more", "data-more": contract.name, hidden: true }, ""));
  box.style.setProperty("--clauses", String(contract.clauses.length));
  return box;
}

/** Beside the word: how much of its limit a cell takes, or what it lacks to be decided. */
const used = (verdict) => (verdict.status === "INCONCLUSIVE" ? missing(verdict) : share(verdict));

function line(row, contract) {
  return el("div", { class: "grid-row", role: "row" },
    el("span", { role: "rowheader", class: "slice" }, place(row.slice)),
    contract.clauses.map((clause) => el("span", { role: "cell", class: "marks", "data-clause": clause.id },
      row.verdicts.filter((verdict) => verdict.clause === clause.id).map((verdict) => mark(verdict, row)))));
}

function mark(verdict, row) {
  const { shape, word, tone } = stateOf(verdict);
  const said = used(verdict);
  const beside = row.verdicts.filter((one) => one.clause === verdict.clause);
  const against = new Set(beside.map((one) => one.kernel_train)).size > 1 ? ` against ${verdict.kernel_train}` : "";
  // Beside another version's cells, also those of other slices, a verdict is of which one?
  const several = (beside.length > 1 || (row.versions > 1 && verdict.kernel_inference)) && `${verdict.kernel_inference}${against}`;
  return el("a", {
    class: `mark ${verdict.status === "NO_DATA" && !verdict.kernel_inference ? "never" : tone}`,
    href: address(verdict),
    title: verdict.reason,
    "data-focus": `${verdict.clause} ${verdict.kernel_inference} ${verdict.kernel_train}`,
    // It ends with what is seen, so that it can be said to who operates the page by voice.
    "aria-label": `${verdict.clause} on ${place(verdict.slice)}: ${[word, said, several].filter(Boolean).join(" ")}`,
  },
  el("span", { class: "shape", "aria-hidden": "true" }, shape),
  el("span", { class: "word" }, word), " ",
  el("span", { class: "used" }, said), " ",
  several && el("span", { class: "kernel" }, several));
}
