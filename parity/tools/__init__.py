"""Programs beside the run: settings audit, upstream issues, benchmarks."""
