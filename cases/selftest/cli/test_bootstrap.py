"""What is installed, and that another interpreter's torch and triton stay."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from parity import bootstrap


@pytest.fixture
def calls(monkeypatch):
    """What pip is told to install, and the constraints that it is given, without anything being installed."""
    told = []

    def run(command, **options):
        at = command.index("--constraint") + 1
        told.append((command[at + 1 :], Path(command[at]).read_text().splitlines()))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(bootstrap.venv, "EnvBuilder", lambda **k: SimpleNamespace(create=lambda folder: None))
    return told


def test_torch_is_installed_first_and_then_the_rest(calls, tmp_path):
    assert bootstrap.install(tmp_path / "new", system=False) == 0
    (torch, _), (rest, _) = calls
    assert len(torch) == 1 and torch[0].startswith("torch==") and rest[0] == "--editable"


def test_a_container_keeps_its_triton_under_another_name(calls, tmp_path, monkeypatch):
    """NVIDIA's have torch 2.9.0a0+nv25.10 and `pytorch-triton`: both are pins, and pip is told that Triton is there."""
    has = {"torch": "2.9.0a0+nv25.10", "pytorch-triton": "3.4.0+gitabc"}
    monkeypatch.setattr(bootstrap, "version", has.get)
    site = tmp_path / "new" / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    assert bootstrap.install(tmp_path / "new", system=True) == 0
    assert "Name: triton\nVersion: 3.4.0+gitabc" in next(site.glob("triton-*.dist-info/METADATA")).read_text()
    ((_, pins),) = calls
    pins = [line.split("==") for line in pins if not line.startswith("#")]
    assert {name: version for name, version in pins if "torch" in name or "triton" in name} == has
