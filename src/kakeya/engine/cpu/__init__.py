"""The CPU backend: attention over slabs in place, tokens chosen by the native kernels."""
