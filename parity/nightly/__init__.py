"""The nightly gate: proof that it can see, a long run, history, what changed since the night before, one page."""
