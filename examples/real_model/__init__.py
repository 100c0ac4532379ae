"""How far apart today's kernels are on a real pretrained model: `make study`."""
