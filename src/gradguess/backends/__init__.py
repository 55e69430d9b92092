"""Every line that knows a device, a stream, a CUDA graph or a kernel.

The rest of gradguess calls functions of this package and never asks where a tensor lies. Each function has one meaning
on every device; only its speed, and its accuracy within the stated bounds, depend on the device.

This package imports nothing of gradguess but `gradguess.errors`.
"""
