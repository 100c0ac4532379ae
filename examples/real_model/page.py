"""Sentences, tables and pictures of the handbook's page, from what was measured."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from examples.real_model.figures import ACCEPTED, ALL, read, save_recording, together
from examples.real_model.gradients import PAIRS as BIASED
from examples.real_model.kernels import PAIRS
from examples.real_model.located import FAULTS

HERE: Final = Path(__file__).resolve().parent
PAGES: Final = HERE.parents[1] / "kc_otel" / "handbook" / "pages"
PAGE: Final = PAGES / "measure" / "real-model.md"
RECORDED: Final = ("vllm-bf16", "hf-bf16", "llama-q4_1", "vllm-fp8-kv", "vllm-w8a8")
"""Pairs whose log-probabilities are checked in: those that somebody may accept."""
_BEGIN, _END = "<!-- {}: begin -->", "<!-- {}: end -->"

Figures = Mapping[str, Any]


def report(folder: Path, *, write: bool) -> int:
    """Print what the page's blocks are of a folder with measurements; with `write` replace page, pictures and data."""
    pairs = together(folder, PAIRS)
    if not pairs:
        print(f"{folder}: nothing was measured there yet; run `make study`", file=sys.stderr)
        return 2
    kinds = {"training": "rl", "located": "located", "gradients": "gradient"}
    results = _rounded({"pairs": pairs} | {kind: _read(folder, start) for kind, start in kinds.items()})
    said = blocks(results)
    for text in said.values():
        print(text)
    if write:
        from examples.real_model.pictures import draw  # noqa: PLC0415 - tables need no matplotlib

        (HERE / "results.json").write_text(_lines(results), encoding="utf-8")
        for name in RECORDED:
            if name in pairs:
                save_recording(read(folder, name), HERE / "recordings" / f"{name}.npz")
        draw(results["pairs"], results["training"], PAGES / "pictures")
        page = PAGE.read_text(encoding="utf-8")
        for name, text in said.items():
            page = replaced(page, name, text)
        PAGE.write_text(page, encoding="utf-8")
    return 0


def blocks(results: Figures) -> dict[str, str]:
    """Every part of the page that has figures in it, by the name of its markers."""
    pairs = results["pairs"]
    return {
        "short": in_short(pairs, results["gradients"]),
        "ran": what_ran(results),
        "drift": drift_table(pairs),
        "answers": answer_table(pairs),
        "gradients": gradient_table(results["gradients"]),
        "faults": fault_table(results["training"]),
        "located": located_table(results["located"]),
        "limits": limit_table(pairs),
    }


def in_short(pairs: Figures, gradients: Figures) -> str:
    """The answers to the reader's questions, a line each."""
    tv = {name: pair["slices"][ALL]["token_tv_exact"] for name, pair in pairs.items()}
    worst = [worst_slice(pair) for pair in pairs.values()]
    most, count = Counter(part for part, _ in worst).most_common(1)[0]
    shown = ACCEPTED if ACCEPTED in pairs else next(iter(pairs))
    entropy, place = pairs[shown]["entropy"], [at["tv"] for at in pairs[shown]["position"]]
    certain, unsure = entropy[0], entropy[-1]
    where = (
        f"{most.capitalize()} is the worst kind of text for {count} of {len(pairs)} pairs; the worst is up to "
        f"{max(ratio for _, ratio in worst):.1f} times the average. {PAIRS[shown].title} has a token TV of "
        f"{number(certain['tv'])} where the next token is certain (entropy below {certain['to']:g} nats), of "
        f"{number(unsure['tv'])} where it is not (above {unsure['from']:g}), and of {number(min(place))} to "
        f"{number(max(place))} depending on the position in the answer."
    )
    moved = [name for name, pair in pairs.items() if _apart_from_zero(pair["slices"][ALL]["reward"])]
    biased = [name for name, biases in gradients.items() if biases.get("reward", {}).get("lower")]
    answers = {name: at["sequence_tv"] for name, pair in pairs.items() if (at := _at(pair, 128))}
    limits = {name: pair["limit"] for name, pair in pairs.items() if name in RECORDED}
    lines = {
        "How far apart?": f"Mean token TV against the training kernel: {_listed(tv)}.",
        "On which traffic?": where,
        "And whole answers?": f"Total variation over the first 128 tokens: {_listed(answers)}.",
        "Does the mean reward change?": f"With this many prompts, a change is detectable for {_titles(moved)}.",
        "Are gradients biased?": f"Measured for {_titles(list(gradients))}; detectable for {_titles(biased)}.",
        "Which limits?": f"On mean token TV, with a margin: {_listed(limits)}.",
    }
    return "".join(f"- **{question}** {answer}\n" for question, answer in lines.items())


def what_ran(results: Figures) -> str:
    """The size of the run, of all pairs at once where it is the same, and the jobs that are not finished."""
    pairs = results["pairs"]
    sizes: dict[str, list[str]] = {}
    for name, pair in pairs.items():
        sizes.setdefault(f"{pair['prompts']} prompts with {pair['sequences']} answers", []).append(name)
    tokens = [pair["tokens"] for pair in pairs.values()]
    parts = [f"{size} for {'every pair' if len(sizes) == 1 else _titles(names)}" for size, names in sizes.items()]
    missing = [f"`locate` on {fault}" for fault in FAULTS if fault not in results["located"]]
    missing += [f"the gradient of {PAIRS[name].title}" for name in BIASED if name not in results["gradients"]]
    unfinished = f" Not finished: {', '.join(missing)}." if missing else ""
    return f"This run: {'; '.join(parts)}; {min(tokens):,} to {max(tokens):,} tokens a pair.{unfinished}\n"


def drift_table(pairs: Figures) -> str:
    """All traffic: the estimate beside the truth, and what it costs."""
    rows = []
    for name, pair in pairs.items():
        of, (worst, ratio) = pair["slices"][ALL], worst_slice(pair)
        rows.append(
            f"{PAIRS[name].title} | {number(of['token_tv'])} ± {number(of['token_tv_error'])} | "
            f"{number(of['token_tv_exact'])} | {number(of['kl_exact'])} | {of['clip_share']:.0%} | "
            f"{of['beyond_clip']:.1%} | {of['ess_sequence']:.2f} | {number(of['design_effect'])} | "
            f"{worst}, {ratio:.1f} times"
        )
    header = "pair | token TV, sampled | exact | KL, exact | clip share | beyond the clip | ESS of answers | "
    return _table(header + "design effect | worst text", rows)


def answer_table(pairs: Figures) -> str:
    """Answers of 32 and 128 tokens beside their bound, and the drift of the mean reward."""
    rows = []
    for name, pair in pairs.items():
        reward = pair["slices"][ALL]["reward"]
        points = (_at(pair, 32) or {}, _at(pair, 128) or {})
        cells = [f"{number(at.get('sequence_tv'))} | {number(at.get('kl_over_steps'))}" for at in points]
        drift = _within(reward["drift"], reward) if "drift" in reward else ""
        rows.append(f"{PAIRS[name].title} | {' | '.join(cells)} | {number(reward['mean'])} | {drift}")
    header = "pair | 32 tokens: TV | by KL | 128 tokens: TV | by KL | mean reward | its drift, 99 % limits"
    return _table(header, rows)


def gradient_table(gradients: Figures) -> str:
    """The bias of the policy gradient beside its bounds."""
    rows = [
        f"{PAIRS[name].title} | {advantage} | {number(of['gradient'])} | {_within(of['bias'], of)} | "
        f"{number(of['by_chi2'])} | {number(of['by_tv'])} | {number(of['by_largest_ratio'])}"
        for name, biases in gradients.items()
        for kind, advantage in (("reward", "reward"), ("adversarial", "sign of 1 - W"))
        if (of := biases.get(kind))
    ]
    header = "pair | advantage | norm of the gradient | bias, 99 % limits | by chi-square | 2 A G TV | "
    return _table(header + "A G (exp(T λ) - 1)", rows)


def fault_table(runs: Figures) -> str:
    """Steps, and seconds from the first rollouts with a fault, to the verdict, to the repair, and to PASS."""
    rows = []
    for name, run in runs.items():
        broken = [step for step in run["steps"] if step["broken"]]
        if not broken:
            continue
        began = broken[0]
        after = [step for step in run["steps"] if step["step"] >= began["step"]]
        repaired = [step for step in after if not step["broken"]]

        def first(steps: Iterable[Figures], time: str, began: Figures = began) -> str:
            at = next(iter(steps), None)
            return f"{at['step']} ({at[time] - began['at']:.0f} s)" if at else "not in this run"

        failed = first((step for step in after if step.get("status") == "FAIL"), "judged_at")
        passed = first((step for step in repaired if step.get("status") == "PASS"), "judged_at")
        worst = number(max(step.get("estimate", 0.0) for step in broken))
        rows.append(f"{name} | {began['step']} | {worst} | {failed} | {first(repaired, 'at')} | {passed}")
    return _table("fault | from step | token TV | FAIL at step | sent again at step | PASS at step", rows)


def located_table(faults: Figures) -> str:
    """What `kc-otel locate run` named, and what that took."""
    rows = []
    for name, found in faults.items():
        parts = [shares["components"][0] for shares in found["shares"]]
        named = f"{parts[0]['name']} | {parts[0]['share']['estimate']:.0%}" if parts else " | "
        rows.append(
            f"{name} | {named} | {parts[1]['name'] if len(parts) > 1 else ''} | {found['seconds']:.0f} | "
            f"{found['processor_seconds']:.0f} | {found['largest_memory'] / 1e9:.1f}"
        )
    header = "fault | culprit | its share of token TV | most of it in | seconds | CPU seconds | GB of memory"
    return _table(header, rows)


def limit_table(pairs: Figures) -> str:
    """The limits of each pair, and how many prompts decide them."""
    rows = []
    for name, pair in pairs.items():
        slices = pair["slice_limits"]
        worst = max(slices, key=slices.__getitem__, default="")
        rows.append(
            f"{PAIRS[name].title} | {number(pair['limit'])} | {worst} {number(slices.get(worst))} | "
            f"{_decided(pair['at_own_limit'])} | {_decided(pair.get('at_accepted_limit'))}"
        )
    header = f"pair | limit | widest slice's limit | verdict, prompts | under {PAIRS[ACCEPTED].title}'s limit"
    return _table(header, rows)


def _decided(at: Figures | None) -> str:
    if not at:
        return ""
    return f"{at['verdict']}, {at['prompts']}" if at["prompts"] else at["verdict"]


def worst_slice(pair: Figures) -> tuple[str, float]:
    """The kind of text with the largest token TV, and how many times the average that is."""
    tv = {part: of["token_tv_exact"] for part, of in pair["slices"].items()}
    average = tv.pop(ALL)
    worst = max(tv, key=lambda part: tv[part])
    return worst, tv[worst] / average


def _apart_from_zero(reward: Figures) -> bool:
    return "lower" in reward and (reward["lower"] > 0.0 or reward["upper"] < 0.0)


def _at(pair: Figures, horizon: int) -> Figures | None:
    return next((point for point in pair["chain"] if point["horizon"] == horizon), None)


def _listed(values: Mapping[str, float]) -> str:
    """Figures by pair, the smallest first."""
    return ", ".join(f"{PAIRS[name].title} {number(values[name])}" for name in sorted(values, key=values.__getitem__))


def _within(value: float, limits: Figures) -> str:
    return f"{number(value)} [{number(limits['lower'])}, {number(limits['upper'])}]"


def _titles(names: Sequence[str]) -> str:
    return ", ".join(PAIRS[name].title for name in names) or "no pair"


def replaced(page: str, name: str, text: str) -> str:
    """The page with what lies between a block's markers replaced.

    Raises:
        ValueError: If a marker is missing.
    """
    begin, end = _BEGIN.format(name), _END.format(name)
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{PAGE}: has to contain {begin} and {end}")
    return f"{before}{begin}\n{text}{end}{after}"


def number(value: float | None) -> str:
    """Two digits; nothing for what is not known."""
    if value is None:
        return ""
    return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}" if value < 1e5 else f"{value:.0e}"


def _table(header: str, rows: Iterable[str]) -> str:
    lines = [header, " | ".join(["---"] * len(header.split("|"))), *rows]
    return "".join(f"| {line} |\n" for line in lines)


def _read(folder: Path, kind: str) -> dict[str, Any]:
    files = sorted(folder.glob(f"{kind}-*.json"))
    return {file.stem.removeprefix(f"{kind}-"): json.loads(file.read_text()) for file in files}


def _lines(results: Figures) -> str:
    """JSON with a line for each pair, run and fault."""
    parts = (
        f'"{name}": {{\n' + ",\n".join(f'"{key}": {json.dumps(of)}' for key, of in part.items()) + "\n}"
        for name, part in results.items()
    )
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rounded(value: Any) -> Any:
    """Five digits are more than two processors agree on."""
    if isinstance(value, dict):
        return {key: _rounded(of) for key, of in value.items()}
    if isinstance(value, list):
        return [_rounded(of) for of in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
