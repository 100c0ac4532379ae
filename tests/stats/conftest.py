"""Samples, histograms and small pairs of kernels whose divergences can be computed exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kc_otel.stats import Buckets, Histogram

ZERO = 2.0**-30


def _index(magnitude, scale):
    index = np.ceil(np.log2(magnitude) * 2.0**scale).astype(np.int64) - 1
    with np.errstate(over="ignore"):
        index += magnitude > np.exp2((index + 1) * 2.0**-scale)
        index -= magnitude <= np.exp2(index * 2.0**-scale)
    return index


def _buckets(magnitude, scale):
    if not magnitude.size:
        return Buckets.empty()
    index = _index(magnitude, scale)
    return Buckets(int(index.min()), np.bincount(index - index.min()).astype(np.int64))


def _histogram(values, scale=4, zero=ZERO):
    x = np.asarray(values, dtype=np.float64).ravel()
    if not x.size:
        return Histogram.empty(scale)
    return Histogram(
        scale=scale,
        count=x.size,
        sum=float(x.sum()),
        zero_count=int((np.abs(x) <= zero).sum()),
        positive=_buckets(x[x > zero], scale),
        negative=_buckets(-x[x < -zero], scale),
        minimum=float(x.min()),
        maximum=float(x.max()),
        zero_threshold=zero,
    )


@pytest.fixture(scope="session")
def histogram_of():
    """Builds the exponential histogram of a sample, value by value's own definition."""
    return _histogram


@pytest.fixture(scope="session")
def three_sigma():
    """Largest miss rate that Monte Carlo error explains: alpha plus three standard deviations over the runs."""
    return lambda alpha, runs: alpha + 3.0 * math.sqrt(alpha * (1.0 - alpha) / runs)
