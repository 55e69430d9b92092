"""Many runs in many processes, one file of results. Needs PyTorch and NumPy, nothing else.

    python -m gradguess.experiments.sweep CONFIGS.json OUT_DIR --workers 8

`CONFIGS.json` is a list of objects with fields of `TrainConfig`; what is left out keeps its default. Each
result is a line of `OUT_DIR/results.jsonl` as soon as it ends, so a killed sweep keeps what was finished, and
the same command runs only what is missing. A run that fails is a line of `errors.jsonl`; the others go on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from gradguess.errors import GradguessError
from gradguess.experiments.config import TrainConfig
from gradguess.experiments.files import exclusive, explained


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The results in a `results.jsonl`, by key; a last line that a kill cut short is left out."""
    if not path.exists():
        return {}
    results = {}
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            results[record["key"]] = record
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise GradguessError(f"{path}, line {number} is damaged: {error}") from error
    return results


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line and push it out of this process."""
    with explained(path), path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def sweep(configs: Iterable[TrainConfig], directory: Path, workers: int) -> dict[str, dict[str, Any]]:
    """Run what `directory` does not hold yet; all results by key."""
    with exclusive(directory):
        path = directory / "results.jsonl"
        done = read_results(path)
        if path.exists():  # without the line that a kill cut short
            path.write_text("".join(json.dumps(record) + "\n" for record in done.values()))
        todo = {config.key: config for config in configs if config.key not in done}
        started = time.perf_counter()
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        with ProcessPoolExecutor(max(1, min(workers, len(todo))), context, initializer=_one_thread) as pool:
            futures = [pool.submit(_attempt, config) for config in todo.values()]
            for number, future in enumerate(as_completed(futures), 1):
                record = future.result()
                append(directory / ("errors.jsonl" if "error" in record else "results.jsonl"), record)
                if "error" not in record:
                    done[record["key"]] = record
                _say(record, number, len(todo), time.perf_counter() - started)
    return done


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _attempt(config: TrainConfig) -> dict[str, Any]:
    from gradguess.experiments.train import train

    try:
        _free_memory()  # of the run before, so that the peak is this run's own
        return train(config)
    except Exception as error:  # one failure must not cost the other runs
        return {
            "key": config.key,
            "config": config.as_dict(),
            "error": str(error),
            "trace": traceback.format_exc(),
        }


def _free_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _say(record: dict[str, Any], number: int, total: int, seconds: float) -> None:
    if "error" in record:
        text = f"FAILED: {record['error'].splitlines()[0] if record['error'] else 'no message'}"
    else:
        metrics = record["metrics"]
        accuracies = f"train {metrics['train_accuracy']:.3f} test {metrics['test_accuracy']:.3f}"
        text = f"{accuracies} {metrics['seconds']:.0f} s"
    print(f"[{number}/{total} {seconds:.0f} s] {record['key']}: {text}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run many configurations; keep each result as it ends.")
    parser.add_argument("configs", type=Path, help="JSON list of configurations")
    parser.add_argument("out", type=Path, help="directory for results.jsonl")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    try:
        with explained(options.configs):
            entries = json.loads(options.configs.read_text())
        configs = [TrainConfig.from_dict(entry) for entry in entries]
        done = sweep(configs, options.out, options.workers)
    except (GradguessError, json.JSONDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(config.key in done for config in configs) else 1


if __name__ == "__main__":
    sys.exit(main())
