"""From errors to verdicts: gates, side effects, exact relations, one case through every implementation."""
