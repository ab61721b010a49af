"""Comparisons per CPU second, and the comparison of two results files."""
