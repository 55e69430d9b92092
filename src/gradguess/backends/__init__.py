"""Every line that knows a device, a stream, a CUDA graph or a kernel.

The rest of gradguess calls the functions below and never asks where a tensor lies. Each function has one meaning on
every device; only its speed, and its accuracy within the stated bounds, depend on the device.

| file | what it does |
|---|---|
| `cuda_graphs` | steps recorded once and replayed |
| `policy` | what other code is told about a device |
| `random` | the state of random generators |
| `meter` | seconds and peak memory of a run |
| `kernels`, `triton_kernels` | Triton kernels of noise and of attention's tangent, and their launch |

This package imports nothing of gradguess but `gradguess.errors`.
"""

from gradguess.backends.meter import peak_bytes, seconds
from gradguess.backends.random import RandomState, seed_global

__all__ = [
    "RandomState",
    "peak_bytes",
    "seconds",
    "seed_global",
]
