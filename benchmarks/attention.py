"""The tangent of attention on a GPU: is the kernel right, and what does it cost beside other ways?

    python benchmarks/attention.py --out FILE.json --parts check,time,tune --seconds 55

`check` compares the kernel with float64 for many settings. `time` gives milliseconds and the peak of memory above the
arguments, for causal attention over 2048 positions, 8 samples, 8 heads of 64: through the rules of gradguess, in blocks
of plain operations, by PyTorch's math kernel under forward mode, and by the package jvp_flash_attention if it can be
imported. `tune` times the kernel with other blocks. The file is written anew after every row; what did not fit into the
given seconds is named in it.
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

from gradguess.backends import kernels
from gradguess.layers.attention import in_blocks
from gradguess.layers.table import TangentRules

Row = dict[str, Any]
HALF, BRAIN = torch.float16, torch.bfloat16
CHECKS = [  # dtype, batch, heads, heads of keys, queries, keys, head size, kind of mask
    (HALF, 2, 4, 4, 256, 256, 64, "causal"),
    (BRAIN, 2, 4, 4, 256, 256, 64, "causal"),
    (HALF, 2, 4, 2, 200, 331, 64, "none"),
    (HALF, 2, 4, 4, 77, 130, 64, "boolean"),
    (BRAIN, 2, 4, 4, 130, 77, 64, "additive"),
    (HALF, 2, 4, 4, 256, 256, 128, "causal"),
    (BRAIN, 2, 4, 4, 256, 256, 128, "boolean"),
    (HALF, 2, 4, 4, 256, 256, 16, "causal"),
    (HALF, 2, 4, 4, 256, 256, 32, "causal"),
    (BRAIN, 2, 4, 4, 150, 150, 80, "none"),
    (HALF, 2, 4, 4, 256, 256, 128, "additive"),
]
TILES = [
    (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 4, 4), (128, 32, 8, 3),
    (128, 32, 8, 2), (64, 32, 4, 2), (128, 128, 8, 2), (64, 128, 4, 2),
]  # fmt: skip


def arguments(dtype: torch.dtype, q: tuple[int, ...], k: tuple[int, ...]) -> list[Tensor]:
    """Queries, keys, values and their tangents, from a CPU's generator."""
    source = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=source).to("cuda", dtype) for shape in (q, k, k, q, k, k)]


def split(a: list[Tensor], out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Queries, keys and values, what attention makes of them, and their tangents together."""
    return a[0], a[1], a[2], out, tuple(a[3:])


def check(setting: tuple[Any, ...]) -> Row:
    """Errors over the largest number, to be a few roundings; `blocks`: those of plain operations."""
    dtype, batch, heads, shared, queries, keys, d, kind = setting
    a = arguments(dtype, (batch, heads, queries, d), (batch, shared, keys, d))
    mask = None
    if kind in ("boolean", "additive"):
        drawn = torch.randn(batch, 1, queries, keys, generator=torch.Generator().manual_seed(1))
        mask = (drawn > 0 if kind == "boolean" else drawn.masked_fill(drawn < -1, -torch.inf)).cuda()
        mask[0, 0, 3] = False if kind == "boolean" else -torch.inf  # a query that sees no key
        mask = mask if kind == "boolean" else mask.to(dtype)
    rest = kind == "causal", d**-0.5
    wide = mask.double() if kind == "additive" else mask
    doubles = [t.double() for t in a]
    with sdpa_kernel(SDPBackend.MATH):
        options = {"attn_mask": wide, "is_causal": rest[0], "enable_gqa": True}
        out = F.scaled_dot_product_attention(*doubles[:3], **options)
    exact = in_blocks(*split(doubles, out), wide, *rest)
    found = kernels.attention_tangent(*split(a, out.to(dtype)), mask, *rest)
    plain = in_blocks(*split(a, out.to(dtype)), mask, *rest)
    row: Row = {"part": "check", "dtype": str(dtype)[6:], "mask": kind}
    row |= {"shape": [batch, heads, shared, queries, keys, d]}
    for name, ours in (("kernel", found), ("blocks", plain)):
        row[name] = float((ours.double() - exact).abs().max() / exact.abs().max())
    row["right"] = row["kernel"] < max(2e-5, 4 * torch.finfo(dtype).eps)
    return row


def measured(run: Callable[[], Any], most: float = 0.3) -> Row:
    """The median of single calls, in milliseconds, and the peak of memory above what is held before, in MB."""
    run()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - held) / 1e6
    times, end = [], time.perf_counter() + most
    while time.perf_counter() < end and len(times) < 200:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        run()
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]))
    times.sort()
    return {"ms": times[len(times) // 2], "best_ms": times[0], "peak_mb": peak, "calls": len(times)}


def dual(attend: Callable[..., Tensor], a: list[Tensor], *contexts: Any) -> tuple[Tensor, Tensor]:
    with ExitStack() as stack:
        for context in (torch.no_grad(), fwAD.dual_level(), *contexts):
            stack.enter_context(context)
        return tuple(fwAD.unpack_dual(attend(*(fwAD.make_dual(p, t) for p, t in zip(a[:3], a[3:], strict=True)))))


def ways(a: list[Tensor]) -> dict[str, Callable[[], Any]]:
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    scale, out = a[0].shape[-1] ** -0.5, causal(*a[:3])
    found: dict[str, Callable[[], Any]] = {
        "gradguess": lambda: dual(causal, a, TangentRules()),
        "kernel alone": lambda: kernels.attention_tangent(*split(a, out), None, True, scale),
        "blocks": lambda: in_blocks(*split(a, out), None, True, scale),
        "math kernel": lambda: dual(causal, a, sdpa_kernel(SDPBackend.MATH)),
        "PyTorch, no tangent": lambda: causal(*a[:3]),
    }
    try:
        from jvp_flash_attention.jvp_attention import JVPAttn  # type: ignore[import-not-found]
    except ImportError:
        return found
    return found | {"jvp_flash_attention": lambda: dual(partial(JVPAttn.fwd_dual, causal=True), a)}


SIZES = [  # dtype, samples, positions, head size
    (HALF, 8, 2048, 64), (BRAIN, 8, 2048, 64), (HALF, 1, 8192, 64), (HALF, 8, 2048, 128),
    (HALF, 64, 128, 64), (HALF, 64, 32, 64),
]  # fmt: skip


def timed(size: tuple[Any, ...]) -> list[Row]:
    dtype, batch, positions, d = size
    shape = (batch, 8, positions, d)
    a, rows, truth = arguments(dtype, shape, shape), [], None
    for name, run in ways(a).items():
        row: Row = {"part": "time", "way": name, "dtype": str(dtype)[6:], "shape": list(shape)}
        try:
            out = run()
            out = out if isinstance(out, list | tuple) else [out]
            truth = truth or [t.float() for t in out]
            row["apart"] = float((out[-1].float() - truth[-1]).abs().max()) if "no tangent" not in name else None
            del out
            row |= measured(run)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        rows.append(row)
    return rows


def tuned(dtype: torch.dtype, d: int, tiles: tuple[int, int, int, int]) -> Row:
    shape = (8, 8, 2048, d)
    row: Row = {"part": "tune", "dtype": str(dtype)[6:], "d": d, "tiles": list(tiles)}
    a = arguments(dtype, shape, shape)
    try:
        return row | measured(lambda: kernels.attention_tangent(*split(a, a[2]), None, True, d**-0.5, tiles=tiles), 0.2)
    except Exception as error:  # too much shared memory, for instance
        return row | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="time,tune,check")
    parser.add_argument("--seconds", type=float, default=55)
    options = parser.parse_args()
    end = time.perf_counter() + options.seconds
    jobs: dict[str, list[Callable[[], Any]]] = {
        "check": [partial(check, setting) for setting in CHECKS],
        "time": [partial(timed, size) for size in SIZES],
        "tune": [partial(tuned, HALF, 64, tiles) for tiles in TILES]
        + [partial(tuned, HALF, 128, tiles) for tiles in ((128, 32, 8, 2), (64, 32, 4, 2), (64, 64, 8, 2))],
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
