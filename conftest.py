"""Settings of a test process, made before torch is imported; leaves out the slow tests where nobody asked for them."""

import pytest

from parity.process import prepare


def pytest_addoption(parser):
    """`--parity-cases N`: drawn cases of each implementation in cases/test_drawn.py."""
    parser.addoption("--parity-cases", type=int, default=12, help="drawn cases per implementation")


def pytest_configure(config):
    """One thread a process, full float32 products, Triton's interpreter where there is no GPU."""
    import torch

    prepare("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(config, items):
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: python -m pytest cases -m slow"))
