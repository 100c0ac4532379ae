"""Rollouts of a healthy kernel, the faults of public bug reports planted in them, and drift that is no fault.

Every distribution is a softmax; tokens are sampled from the inference kernel's. What a kernel does to its logits has
the size that was measured on vLLM, on a 135M model and on llama.cpp's formats.
"""

import numpy as np


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def texts(rng, shape, sure, vocabulary=24):
    """Logits at positions that are sure of their token in this share, and open otherwise."""
    certain = rng.random(shape) < sure
    logits = rng.standard_normal((*shape, vocabulary))
    logits[..., 0] += np.where(certain, rng.uniform(1, 3, shape), 0)
    return (logits * np.where(certain, rng.uniform(5, 12, shape), rng.uniform(0.5, 2.5, shape))[..., None]).astype("f4")


def sampled(rng, train, inference):
    """Log P and log Q of tokens that are drawn from Q, float32."""
    sides = [log_softmax(side.astype(np.float64)) for side in (train, inference)]
    token = np.argmax(sides[1] + rng.gumbel(size=sides[1].shape), -1)[..., None]
    return tuple(np.take_along_axis(side, token, -1)[..., 0].astype(np.float32) for side in sides)


def bfloat16(values):
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


NOISE = {"bf16": 0.03, "fp8": 0.25, "int8": 0.08, "int4": 0.5, "temperature 1": 0.1, "none": 0.0}
HONEST = (*NOISE, "stale", "bf16 stored", "bf16 computed", "bf16 logits")


def honest(kind, rng, shape, sure, share=0.0):  # noqa: PLR0911 - a kind each
    """Log P and log Q of two kernels that differ, [rows, tokens]."""
    logits = texts(rng, shape, sure)

    def noise(size):
        return (size * rng.standard_normal(logits.shape)).astype("f4")

    if kind in NOISE:
        return sampled(rng, logits, logits + noise(NOISE[kind]) * (1 + 0.05 * np.abs(logits) * (kind == "int4")))
    if kind == "stale":  # another step's weights: more at some positions
        return sampled(rng, logits + noise(0.3) * rng.standard_exponential((*shape, 1)).astype("f4"), logits)
    if kind == "bf16 logits":
        return sampled(rng, logits, bfloat16(logits + noise(0.02)))
    if kind == "garbage":  # some positions compute something else altogether
        other = np.where(rng.random((*shape, 1)) < share, rng.standard_normal(logits.shape) * 2, logits)
        return sampled(rng, logits, other + noise(0.05))
    if kind == "copied":  # long stretches in which nothing else is possible
        stretch = np.zeros(shape, dtype=bool)
        for row in stretch:
            for start in rng.integers(0, shape[1], 3):
                row[start : start + rng.integers(10, 80)] = True
        logits[..., 0] += np.where(stretch, rng.uniform(9, 40, shape), 0) * 1.0
        return tuple(side.astype("f4") for side in sampled(rng, logits, logits + noise(0.03)))
    train, inference = sampled(rng, logits, logits + noise(0.03))
    if kind == "bf16 stored":
        return bfloat16(train), bfloat16(inference)
    assert kind == "bf16 computed"  # a log-softmax on a grid of 1/16
    return train, np.minimum(np.round(inference * 16) / 16, 0).astype("f4")


def healthy(sequences=150, tokens=96, seed=0):
    """Pairs (log P, log Q) of sequences of different lengths, a bfloat16 kernel, as float64."""
    rng = np.random.default_rng(seed)
    train, inference = honest("bf16", rng, (sequences, tokens), 0.4)
    lengths = rng.integers(tokens * 2 // 5, tokens + 1, sequences)
    lengths[::3] = tokens
    rows = zip(train.astype(float), inference.astype(float), lengths, strict=True)
    return [(p[:n], q[:n]) for p, q, n in rows]


def both(change):
    return lambda rows, rng: [change(p, q, rng) for p, q in rows]


def only_q(change):
    return both(lambda p, q, rng: (p, change(q.copy(), rng)))


def _put(values, at, filler):
    values[at] = filler
    return values


def _chunks(q, _rng):
    """Four chunks of context parallelism, in another order."""
    parts = np.array_split(q, 4)
    return np.concatenate([parts[0], parts[3], parts[1], parts[2]])


def _likeliest(rows, rng):
    """The likeliest token's log-probability on the inference side in the place of the sampled one's."""
    logits = texts(rng, (len(rows), 96), 0.4)
    train, _ = sampled(rng, logits, logits + 0.03 * rng.standard_normal(logits.shape))
    return list(zip(train.astype(float), log_softmax(logits.astype(float)).max(-1), strict=True))


def _tool(p, q, rng):
    p = np.concatenate([p[:30], -rng.exponential(4.0, 20), p[30:]])
    return p, np.concatenate([q[:30], np.zeros(20), q[30:]])


def _middle(p, q, _rng):
    return tuple(np.concatenate([side[:30], np.zeros(240), side[30:]]) for side in (p, q))


def _copied(p, q, rng):
    tool = -rng.exponential(3.0, 24)
    return tuple(np.concatenate([side[:30], tool, side[30:]]) for side in (p, q))


FAULTS = {
    "the last token appended by hand": (
        both(lambda p, q, rng: (np.append(p, -3.0 - 4 * rng.random()), np.append(q, 0.0))),
        "placeholder",
        ("exactly 0 on the inference side", "each the last of its sequence"),
    ),
    "tool tokens of one side": (both(_tool), "placeholder", ("up to 20 in a row", "tokens 30 to 49")),
    "tool tokens of both sides": (both(_middle), "placeholder", ("on both sides, up to 240 in a row", "30 to 269")),
    "a few tokens of the prompt": (
        both(lambda p, q, _: tuple(np.concatenate([np.zeros(4), side]) for side in (p, q))),
        "placeholder",
        ("with which the sequences begin are exactly 0 on both sides, 4 in most",),
    ),
    "ones of a mask": (
        both(lambda p, q, _: (p, _put(q.copy(), slice(0, 5), 1.0))),
        "placeholder",
        ("tokens on the inference side, the first of them token 0", "which is 1"),
    ),
    "a little padding": (
        both(lambda p, q, _: tuple(np.append(side, np.zeros(3 + p.size % 4)) for side in (p, q))),
        "placeholder",
        ("with which the sequences end are exactly 0 on both sides, 3 in most",),
    ),
    "tool tokens copied": (both(_copied), "placeholder", ("the same number on both sides, up to 2",)),
    "a number too many": (
        only_q(lambda q, _: np.concatenate([q[: q.size // 2], [-0.7], q[q.size // 2 : -1]])),
        "not_same_tokens",
        ("(lag -1)",),
    ),
    "encoded again": (
        both(lambda p, q, rng: (p, _put(np.append(q[3:], np.zeros(3)), np.arange(20), -rng.exponential(1.2, 20)))),
        "not_same_tokens",
        ("the sides do not score the same tokens", "; and ", "exactly 0 on the inference side"),
    ),
    "the likeliest token": (_likeliest, "not_sampled", ("likeliest token's log-probability",)),
    "accepted by speculation": (
        only_q(lambda q, rng: np.where(rng.random(q.size) < 0.6, 0.0, q)),
        "placeholder",
        ("exactly 0 on the inference side where the other gives",),
    ),
    "shifted by two": (both(lambda p, q, _: (p[2:], q[:-2])), "not_same_tokens", ("from the first token", "(lag -2)")),
    "shifted from the second turn on": (
        only_q(lambda q, _: np.concatenate([q[: q.size // 2], q[q.size // 2 + 1 :], [-1.0]])),
        "not_same_tokens",
        ("(lag 1)", "from token"),
    ),
    "chunks in another order": (only_q(_chunks), "not_same_tokens", ()),
    "a sentinel": (
        both(lambda p, q, rng: (p, _put(q.copy(), q.size // 2, -9999.0) if rng.random() < 0.1 else q)),
        "impossible_token",
        ("tokens on the inference side, the first of them token ",),
    ),
    "the lowest float": (
        both(lambda p, q, rng: (p, _put(q.copy(), 1, float(np.finfo("f4").min)) if rng.random() < 0.1 else q)),
        "impossible_token",
        ("tokens on the inference side, the first of them token ",),
    ),
    "the mean at each token": (only_q(lambda q, _: np.full(q.size, q.mean())), "one_value", ("one value per",)),
    "rows in another order": (
        lambda rows, _: [(p[: min(p.size, q.size)], q[: min(p.size, q.size)])
                         for (p, _), (_, q) in zip(rows, rows[1:] + rows[:1], strict=True)],
        "not_same_tokens",
        (),
    ),
    "a floor": (only_q(lambda q, _: np.maximum(q, -2.5)), "placeholder", ("a floor",)),
    "the sides the wrong way round": (
        lambda rows, rng: [(q, p) for p, q in zip(*honest("int4", rng, (len(rows), 96), 0.4), strict=True)],
        "not_sampled",
        (),
    ),
}  # fmt: skip
"""Name -> how to plant it, the reason that names it, and words that say where."""
FAULTS_OF_BATCHES = ("the sides the wrong way round",)
"""Which only show over a whole batch."""
