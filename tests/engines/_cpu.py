"""What only some processors can do."""

from __future__ import annotations

from pathlib import Path

import pytest

AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text().split()
"""Whether vLLM can keep keys and values in fp8."""

READ_BACK = "amx_tile" not in Path("/proc/cpuinfo").read_text().split()
"""Whether what stands in vLLM's KV cache can be read back: AMX has a layout of its own."""

needs_avx512 = pytest.mark.skipif(not AVX512, reason="vLLM keeps keys and values in fp8 only on a CPU with AVX-512")

avx512_arithmetic = pytest.mark.skipif(
    not AVX512, reason="the limits are for vLLM's kernels with AVX-512, whose int8 products and sums are others"
)
