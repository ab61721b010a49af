"""Programs beside the run: upstream issues, benchmarks."""
