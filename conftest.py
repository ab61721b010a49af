"""Loads the plugin, which is parity/plugin.py, and leaves out the slow tests where nobody asked for them."""

import pytest

pytest_plugins = ["parity.plugin"]


def pytest_collection_modifyitems(config, items):
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: python -m pytest cases -m slow"))
