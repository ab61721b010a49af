"""Loads the plugin; everything else is in parity/plugin.py."""

pytest_plugins = ["parity.plugin"]
