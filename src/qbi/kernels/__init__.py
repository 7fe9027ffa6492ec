"""Kernels for NVIDIA GPUs, written in Triton, which torch brings along. Imported where a tensor is on such a device, never before."""
