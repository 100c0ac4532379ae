"""PyTorch that sees no AMX tiles: kernels are then the same on every processor with AVX-512.

With AMX the numbers of vLLM 0.32 depend on the batch for short prompts, too, and a worker that is a process of its own
dies of SIGILL: nobody has asked Linux for the tiles (`arch_prctl(ARCH_REQ_XCOMP_PERM)`). `make engines` puts this into
the environment, where every process imports it when it starts (without_amx.pth), launchers of others or not.
"""

import os
import sys
from importlib.machinery import PathFinder


class _WithoutTiles:
    """Finds `torch.cpu`, where vLLM asks for them."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch.cpu":
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module._is_amx_tile_supported = lambda: False  # nothing public, and no variable, says so

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _WithoutTiles)
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
