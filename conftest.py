"""Settings of a test process, made before torch is imported."""

from parity.process import prepare


def pytest_addoption(parser):
    """`--parity-cases N`: drawn cases of each implementation in cases/test_drawn.py."""
    parser.addoption("--parity-cases", type=int, default=12, help="drawn cases per implementation")


def pytest_configure(config):
    """One thread a process, full float32 products, Triton's interpreter where there is no GPU."""
    import torch

    prepare("cuda" if torch.cuda.is_available() else "cpu")
