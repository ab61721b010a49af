"""Our own corrected implementations, judged like any other."""
