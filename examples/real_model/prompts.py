"""The study's traffic: 32 prompts in six slices, and for each a reward in [0, 1] that a program can compute."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

PROMPTS: Final = 32
SLICES: Final = ("code", "arithmetic", "prose", "german", "json", "long")
TOKENS: Final = 128
LONG_TOKENS: Final = 512
"""The first two texts go on for so long: bounds over long horizons are compared on them."""

Reward = Callable[[str], float]


@dataclass(frozen=True)
class Prompt:
    """A prompt, its slice, how many tokens may answer it, and how an answer is rewarded.

    Attributes:
        text: A user's message, or, in prose, the beginning of a text to go on with.
    """

    slice: str
    text: str
    reward: Reward
    tokens: int = TOKENS

    def ids(self, tokenizer: Any) -> list[int]:
        """Token ids as the model is given them."""
        if self.slice == "prose":
            return list(tokenizer(self.text)["input_ids"])
        message = [{"role": "user", "content": self.text}]
        return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))


def prompts() -> list[Prompt]:
    """All of them, one of each slice after the other: the first 6 n are n of every slice."""
    found = {
        "code": [Prompt("code", f"Write a Python function that {task}. Answer with code only.", is_python)
                 for task in _TASKS],
        "arithmetic": [Prompt("arithmetic", text, says(answer)) for text, answer in _SUMS],
        "prose": [Prompt("prose", text, distinct_words, LONG_TOKENS if place < 2 else TOKENS)
                  for place, text in enumerate(_BEGINNINGS)],
        "german": [Prompt("german", text, is_german) for text in _FRAGEN],
        "json": [Prompt("json", f"Write a JSON object that describes {thing}. Answer with JSON only.", is_json)
                 for thing in _THINGS],
        "long": [_stock(seed) for seed in range(6)],
    }  # fmt: skip
    return [found[name][place] for place in range(6) for name in SLICES][:PROMPTS]


def is_python(text: str) -> float:
    """1 where the answer, or its first fenced block, is Python with a function in it."""
    fenced = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", text, re.DOTALL)
    try:
        parsed = ast.parse(fenced[1] if fenced else text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    return float(any(isinstance(node, ast.FunctionDef) for node in ast.walk(parsed)))


def is_json(text: str) -> float:
    """1 where what stands between the first and the last brace is a JSON object."""
    found = re.search(r"\{.*\}", text, re.DOTALL)
    try:
        return float(bool(found) and isinstance(json.loads(found[0]), dict))
    except (ValueError, RecursionError):
        return 0.0


def says(answer: int) -> Reward:
    """1 where a number stands in the answer."""
    return lambda text: float(re.search(rf"(?<![\d.,]){answer}(?![\d]|[.,]\d)", text) is not None)


def distinct_words(text: str) -> float:
    """The share of words that were not there before: falls when a text goes in circles."""
    words = re.findall(r"\w+", text.lower())
    return len(set(words)) / len(words) if words else 0.0


def is_german(text: str) -> float:
    """1 where at least three words of ten are common German ones."""
    words = re.findall(r"\w+", text.lower())
    return float(bool(words) and sum(_GERMAN.fullmatch(word) is not None for word in words) >= 0.3 * len(words))


def _stock(seed: int) -> Prompt:
    chance = random.Random(seed)
    rows = [(shelf, chance.randint(11, 999), chance.choice(_PARTS)) for shelf in range(1, 61)]
    shelf, count, part = rows[chance.randrange(60)]
    lines = "\n".join(f"Shelf {number} holds {amount} {name}." for number, amount, name in rows)
    return Prompt("long", f"{lines}\n\nHow many {part} are on shelf {shelf}?", says(count))


_GERMAN = re.compile(
    r"der|die|das|und|ist|in|zu|den|mit|von|eine?|einen|einer|nicht|es|sich|auf|für|im|dem|des|auch|als|an|sie|er|ich|"
    r"wir|man|kann|wie|oder|bei|aus|nach|sind|war|wird|hat|haben|werden|zum|zur|um|aber|wenn|nur|noch|so|über"
)
_PARTS = ("bolts", "hinges", "springs", "washers", "screws", "brackets", "valves", "gears")
_TASKS = (
    "returns the largest of a list of numbers",
    "counts the vowels in a string",
    "tells whether a word is the same read backwards",
    "adds two matrices given as lists of rows",
    "removes duplicates from a list and keeps its order",
    "returns the first n Fibonacci numbers",
)
_SUMS = (
    ("What is 17 + 26? Explain briefly.", 43),
    ("A box holds 12 eggs. How many eggs are in 7 boxes? Explain step by step.", 84),
    ("I had 50 euros and spent 18 of them. How much is left? Explain.", 32),
    ("What is 144 divided by 12? Explain briefly.", 12),
    ("Anna is 9 years old and her brother is three times as old. How old is he? Explain.", 27),
    ("A train goes 60 km in one hour. How far does it go in four hours? Explain step by step.", 240),
)
_BEGINNINGS = (
    "The lighthouse had been dark for eleven years when the keeper's daughter came back. She",
    "Bread is one of the oldest foods that people prepare. In its simplest form,",
    "On the morning of the flood, the mayor was still asleep. The river",
    "Rivers shape the land in several ways. The most important of them",
    "My grandmother kept a tin of buttons on the windowsill, and every button had a story. The first",
    "The invention of the printing press changed how knowledge travelled. Before it,",
)
_FRAGEN = (
    "Was ist der Unterschied zwischen Wetter und Klima? Antworte auf Deutsch.",
    "Erzähle mir auf Deutsch eine kurze Geschichte über einen Hund.",
    "Wie kocht man Kartoffeln? Antworte auf Deutsch.",
    "Beschreibe auf Deutsch die Stadt Berlin.",
    "Warum ist der Himmel blau? Antworte auf Deutsch.",
    "Schreibe auf Deutsch einen Brief an einen Freund.",
)
_THINGS = (
    "a book with title, author and year",
    "a city with its population and three sights",
    "a recipe with a list of ingredients",
    "a customer with an address",
    "a football match with both teams and the goals",
    "a weather report for three days",
)
