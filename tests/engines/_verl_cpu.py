"""A CPU as a platform of verl, by its registry of platforms; to be imported before anything else of verl."""

from __future__ import annotations

import os
from contextlib import nullcontext

os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


class Memory:
    """`torch.cpu` with the functions of `torch.cuda` that verl's logging asks for."""

    mem_get_info = staticmethod(lambda: (1, 1))
    get_device_name = staticmethod(lambda: "CPU")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: 0)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    device_name = vendor_name = "cpu"
    device_module = Memory()

    def is_available(self):
        return True

    def is_platform_available(self, **_):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def communication_backend_name(self):
        return "gloo"

    def nvtx_range(self, _):
        return nullcontext()

    def set_device(self, *_):
        pass

    synchronize = manual_seed = manual_seed_all = empty_cache = set_allocator_settings = set_device
