"""The loops that `benchmarks/compare.py` times side by side."""
