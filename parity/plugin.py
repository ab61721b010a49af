"""The pytest plugin: process settings before torch is imported, and the profile that `pytest cases` draws with."""

import pytest

from parity.process import prepare


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--parity-cases N`: drawn cases of each implementation in cases/test_drawn.py."""
    parser.addoption("--parity-cases", type=int, default=12, help="drawn cases per implementation")


def pytest_configure(config: pytest.Config) -> None:
    """One thread a process, full float32 products, Triton's interpreter where there is no GPU."""
    prepare(device())


def device() -> str:
    """The device that tests run on."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
