"""What a step costs: time and memory of every method against backpropagation, measured and written as JSON."""

from gradguess_lab.bench.run import bench_memory, bench_starts, bench_tasks, bench_time

__all__ = ["bench_memory", "bench_starts", "bench_tasks", "bench_time"]
