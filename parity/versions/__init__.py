"""Environments of other releases (`environment`), and what changed between releases: compare, bisect, history."""
