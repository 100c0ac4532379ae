"""PyTorch that sees no AMX tiles: kernels are then the same on every processor with AVX-512.

With AMX the numbers of vLLM 0.32 depend on the batch for short prompts, too, and a worker that is a process of its own
dies of SIGILL: nobody has asked Linux for the tiles (`arch_prctl(ARCH_REQ_XCOMP_PERM)`). `make engines` puts this into
the environment, where every process imports it when it starts (without_amx.pth), launchers of others or not.

Where PyTorch's own variable ATEN_CPU_CAPABILITY leaves it no AVX-512 (`make test-engines AVX512=0`), vLLM, which asks
`torch.cpu`, sees none either, and loads its library for processors with AVX2.
"""

import os
import sys
from importlib.machinery import PathFinder

AVX512 = os.environ.get("ATEN_CPU_CAPABILITY", "avx512") == "avx512"


class _Hidden:
    """Finds `torch.cpu`, where vLLM asks what the processor can do; nothing public, and no variable, hides it there."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch.cpu":
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            hidden = ["amx_tile", "amx_fp16"] + ([] if AVX512 else ["avx512", "avx512_bf16", "vnni"])
            for feature in hidden:
                setattr(module, f"_is_{feature}_supported", lambda: False)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Hidden)
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16" if AVX512 else "AVX2")
