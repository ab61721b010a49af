"""One case through every implementation: run, judge, blame, hint, rows."""
