"""Attention with its tangent on a GPU: how exact is the kernel, and what does it cost beside other ways?

    python benchmarks/attention.py --out FILE.json --parts error,time --seconds 55

`error` gives the norm of the error in value and tangent over the norm of these, in float64, beside PyTorch's math
kernel; the last size has keys whose tangents share a large part, which changes no weight. `time` gives milliseconds on
the GPU (of calls in a CUDA graph) and the peak of memory above the arguments, for causal attention: through the rules
of gradguess, in blocks of plain operations, by PyTorch's math kernel under forward mode, and by the package
jvp_flash_attention if it can be imported; and what PyTorch's kernels take for the value alone. The file is written anew
after every row; what did not fit into the given seconds is named in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradguess.layers.attention import in_blocks
from gradguess.layers.table import TangentRules

Row = dict[str, Any]
HALF, BRAIN = torch.float16, torch.bfloat16
FULL = torch.float32
ERRORS = [
    (BRAIN, 64, 0),
    (HALF, 64, 0),
    (FULL, 64, 0),
    (BRAIN, 128, 0),
    (BRAIN, 64, 30),
]  # dtype, head size, shared part


def arguments(dtype: torch.dtype, batch: int, positions: int, d: int) -> list[Tensor]:
    """Queries, keys, values and their tangents, for 8 heads."""
    source = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(batch, 8, positions, d, device="cuda", generator=source).to(dtype) for _ in range(6)]


def errors(dtype: torch.dtype, d: int, shared: float) -> Row:
    a = arguments(dtype, 1, 2048, d)
    a[4] += shared * a[4][..., :1, :]
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    exact = dual(causal, [t.double() for t in a], sdpa_kernel(SDPBackend.MATH))
    row: Row = {"part": "error", "dtype": str(dtype)[6:], "d": d, "shared": shared}
    ways = {"gradguess": TangentRules(), "math kernel": sdpa_kernel(SDPBackend.MATH)}
    found = {name: dual(causal, a, way) for name, way in ways.items()} | {"PyTorch, value": [causal(*a[:3])]}
    for name, parts in found.items():
        row[name] = [float((x.double() - y).norm() / y.norm()) for x, y in zip(parts, exact, strict=False)]
    return row


def measured(run: Callable[[], Any]) -> Row:
    """Milliseconds of a call on the GPU, the least of five replays, and the peak of memory above what is held (MB)."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    row: Row = {"peak_mb": round((torch.cuda.max_memory_allocated() - held) / 1e6, 2)}
    graph, calls, times = torch.cuda.CUDAGraph(), 10, []
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    for _ in range(6):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        graph.replay()
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]) / calls)
    return row | {"ms": round(min(times[1:]), 4)}


def dual(attend: Callable[..., Tensor], a: list[Tensor], *contexts: Any) -> tuple[Tensor, Tensor]:
    with ExitStack() as stack:
        for context in (torch.no_grad(), fwAD.dual_level(), *contexts):
            stack.enter_context(context)
        return tuple(fwAD.unpack_dual(attend(*(fwAD.make_dual(p, t) for p, t in zip(a[:3], a[3:], strict=True)))))


def value(a: list[Tensor], backend: SDPBackend) -> Tensor:
    with torch.no_grad(), sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*a[:3], is_causal=True)


def ways(a: list[Tensor]) -> dict[str, Callable[[], Any]]:
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    given = (*a[:3], a[3:], None, True, a[0].shape[-1] ** -0.5)
    found: dict[str, Callable[[], Any]] = {
        "gradguess": lambda: dual(causal, a, TangentRules()),
        "blocks": lambda: in_blocks(*given),
        "math kernel": lambda: dual(causal, a, sdpa_kernel(SDPBackend.MATH)),
        "PyTorch, no tangent": lambda: causal(*a[:3]),
        "flash, no tangent": lambda: value(a, SDPBackend.FLASH_ATTENTION),
        "cuDNN, no tangent": lambda: value(a, SDPBackend.CUDNN_ATTENTION),
    }
    try:
        from jvp_flash_attention.jvp_attention import JVPAttn  # type: ignore[import-not-found]
    except ImportError:
        return found
    return found | {"jvp_flash_attention": lambda: dual(partial(JVPAttn.fwd_dual, causal=True), a)}


SIZES = [  # dtype, samples, positions, head size; 8 heads
    (HALF, 8, 2048, 64), (BRAIN, 8, 2048, 64), (HALF, 1, 8192, 64), (HALF, 8, 2048, 128), (FULL, 8, 2048, 64),
    (BRAIN, 32, 2048, 64), (BRAIN, 8, 2048, 32), (BRAIN, 64, 256, 64), (FULL, 64, 256, 64),
]  # fmt: skip


def timed(dtype: torch.dtype, batch: int, positions: int, d: int) -> list[Row]:
    a, rows = arguments(dtype, batch, positions, d), []
    for name, run in ways(a).items():
        if name in ("blocks", "math kernel") and batch * positions > 16384:
            continue
        row: Row = {"part": "time", "way": name, "dtype": str(dtype)[6:], "shape": [batch, 8, positions, d]}
        try:
            row |= measured(run)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        rows.append(row)
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="error,time")
    parser.add_argument("--seconds", type=float, default=55)
    options = parser.parse_args()
    end = time.perf_counter() + options.seconds
    jobs: dict[str, list[Callable[[], Any]]] = {
        "error": [partial(errors, *size) for size in ERRORS],
        "time": [partial(timed, *size) for size in SIZES],
    }
    found: Row = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    found |= {"rows": [], "left_out": []}
    for part in options.parts.split(","):
        for job in jobs[part]:
            if time.perf_counter() > end:
                found["left_out"].append([part, *map(str, job.args)])
                continue
            made = job()
            for row in made if isinstance(made, list) else [made]:
                found["rows"].append(row)
                print(json.dumps(row), flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            torch.cuda.empty_cache()
    print(json.dumps({"left_out": len(found["left_out"])}))


if __name__ == "__main__":
    main()
