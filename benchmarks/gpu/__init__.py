"""The parts of `python -m benchmarks.gpu_session`, and the programs that they run."""
