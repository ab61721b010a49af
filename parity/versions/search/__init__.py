"""Bisecting releases."""
