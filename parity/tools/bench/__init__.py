"""Time and peak memory of registered implementations, side by side in one process; tables and plot from the records.

`make bench` runs cases/bench with pytest-benchmark and prints what docs/performance.md shows.
"""
