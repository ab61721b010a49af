"""Numerical parity of post-training losses: oracle, reference and candidate on the same bits, with a name for who is wrong."""

__version__ = "0.1.0"
