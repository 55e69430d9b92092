"""Memory of one step in a process of its own, against `loss.backward()`: depth 20 and 80, width 64, batch 6144.

Layers are narrow and the batch is large, so that activations (1½ MiB a layer) and not parameters (16 KiB) are seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WIDTH, BATCH, SHALLOW, DEEP = 64, 6144, 20, 80
ACTIVATION = WIDTH * BATCH * 4 / 2**20  # MiB
FLAT = ["weight-store", "activation-replay", "wt-replay", "shared-replay", "students"]
STORED = {"activation-store-gelu": 2, "activation-store": 2}  # activations a layer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="resets the peak through /proc"),
]


@pytest.fixture(scope="module")
def rise() -> dict[str, float]:
    """MiB by 'method:depth'. What the allocator does by itself only adds, so a second measurement may put it right."""
    first = measure()
    if all(is_flat(first, method) for method in FLAT):
        return first
    second = measure()
    return {spec: min(first[spec], second[spec]) for spec in first}


def measure() -> dict[str, float]:
    probe = Path(__file__).with_name("memory_probe.py")
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "100000", "OMP_NUM_THREADS": "1"}
    specs = [f"{method}:{depth}" for method in ["backward", *FLAT, *STORED] for depth in (SHALLOW, DEEP)]
    command = [sys.executable, str(probe), str(WIDTH), str(BATCH), *specs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def per_layer(rise: dict[str, float], method: str) -> float:
    """What more layers cost, in activations a layer."""
    return (rise[f"{method}:{DEEP}"] - rise[f"{method}:{SHALLOW}"]) / ((DEEP - SHALLOW) * ACTIVATION)


def is_flat(rise: dict[str, float], method: str) -> bool:
    slope = per_layer(rise, method) < 0.1 * per_layer(rise, "backward")
    return slope and rise[f"{method}:{DEEP}"] < 0.15 * rise[f"backward:{DEEP}"]


def test_the_probe_sees_backpropagations_activations(rise):
    assert 0.8 < per_layer(rise, "backward") < 1.5


@pytest.mark.parametrize("method", FLAT)
def test_replay_is_flat_in_depth(rise, method):
    """So are pieces that are freed one by one, without being asked."""
    assert is_flat(rise, method), rise


@pytest.mark.parametrize("method", STORED)
def test_store_keeps_what_it_says(rise, method):
    """An input and a direction a layer, and no tangent, whether dual numbers or the closed form carried it."""
    assert per_layer(rise, method) == pytest.approx(STORED[method], abs=0.5)
