"""How much the slow tests do, from the environment: SELFTEST_SEED, SELFTEST_SEEDS and SELFTEST_CASES; SELFTEST_DEVICE: where."""

import os

HOURS = 8 * 3600
"""Limit on the clock of a slow test, in seconds."""


def number(name: str, default: int) -> int:
    """SELFTEST_NAME, or the default of a test."""
    return int(os.environ.get(f"SELFTEST_{name}", default))
