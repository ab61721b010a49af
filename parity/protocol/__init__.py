"""One call of an implementation, and what it must not change."""
