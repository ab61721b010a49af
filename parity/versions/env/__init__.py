"""Environments: other releases, isolated."""
