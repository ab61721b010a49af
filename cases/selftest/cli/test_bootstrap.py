"""Who installs: uv where it can, pip where it cannot, and pip alone over another interpreter's packages."""

import importlib.util
import subprocess
from types import SimpleNamespace

import pytest

from parity import bootstrap
from parity.versions import client


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The commands that are run, without anything being installed; uv fails where `fails` holds a word of its command."""
    done = SimpleNamespace(commands=[], fails="")

    def run(command, **options):
        done.commands.append([str(word) for word in command])
        done.env = options.get("env")
        failed = bool(done.fails) and "pip" in command[1] and done.fails in command
        return subprocess.CompletedProcess(command, int(failed), "- - -", "error: no such wheel")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(bootstrap.venv, "EnvBuilder", lambda **k: SimpleNamespace(create=lambda folder: None))
    monkeypatch.setattr(client, "binary", lambda: "/somewhere/uv")
    monkeypatch.setattr(client, "settings", dict)
    return done


def by(commands):
    return ["uv" if c[0].endswith("uv") else "pip" for c in commands if "install" in c]


def test_uv_installs_torch_first_and_then_the_rest(calls, tmp_path):
    assert bootstrap.install(tmp_path / "new", system=False) == 0
    assert by(calls.commands) == ["uv", "uv"]
    assert calls.commands[0][-1].startswith("torch==") and "--editable" in calls.commands[1]


def test_what_a_link_leads_to_is_not_emptied(calls, tmp_path, capsys):
    other = tmp_path / "other" / "kept"
    other.mkdir(parents=True)
    (tmp_path / "venv").symlink_to(other.parent)
    assert bootstrap.install(tmp_path / "venv", system=False) == 3
    assert other.exists() and "is a link" in capsys.readouterr().out


@pytest.mark.parametrize("fails", ["torch==2.13.0", "--editable"])
def test_pip_does_what_uv_cannot(calls, tmp_path, capsys, fails):
    calls.fails = fails
    assert bootstrap.install(tmp_path / "new", system=False) == 0
    assert by(calls.commands)[-2:] == ["pip", "pip"] and by(calls.commands)[0] == "uv"
    assert "uv cannot: no such wheel; pip does it" in capsys.readouterr().out


def test_without_uv_pip_brings_it_first(calls, tmp_path, monkeypatch):
    def absent():
        raise client.EnvironmentUnusable("no uv")

    monkeypatch.setattr(client, "binary", absent)
    assert bootstrap.install(tmp_path / "new", system=False) == 0
    assert by(calls.commands) == ["pip", "uv", "uv"] and calls.commands[0][-1] == "uv"


def test_what_is_imported_is_compiled_once_whatever_the_user_says_of_his_own_code(calls, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert bootstrap.install(tmp_path / "new", system=False) == 0
    assert calls.commands[-1][0].startswith(str(tmp_path / "new")) and calls.env["PYTHONDONTWRITEBYTECODE"] == ""
    for name in bootstrap.IMPORTED:
        assert importlib.util.find_spec(name), name


def test_over_other_packages_pip_alone(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "version", lambda name: "-")
    assert bootstrap.install(tmp_path / "new", system=True) == 0
    assert by(calls.commands) == ["pip"]


def test_a_container_keeps_its_triton_under_another_name(calls, tmp_path, monkeypatch):
    """NVIDIA's have torch 2.9.0a0+nv25.10 and `pytorch-triton`: both are pins, and pip is told that Triton is there."""
    has = {"torch": "2.9.0a0+nv25.10", "pytorch-triton": "3.4.0+gitabc"}
    monkeypatch.setattr(bootstrap, "version", has.get)
    site = tmp_path / "new" / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    told = []
    monkeypatch.setattr(bootstrap, "by_pip", lambda python, pins, steps: told.append(pins.read_text()) or True)
    bootstrap.install(tmp_path / "new", system=True)
    assert "Name: triton\nVersion: 3.4.0+gitabc" in next(site.glob("triton-*.dist-info/METADATA")).read_text()
    pins = [line.split("==") for line in told[0].splitlines() if not line.startswith("#")]
    assert {name: version for name, version in pins if "torch" in name or "triton" in name} == has
