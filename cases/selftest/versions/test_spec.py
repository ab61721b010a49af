"""What may stand after `--with`, and that the refusal of anything else is one line that helps."""

import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import parity
from parity.errors import UsageError
from parity.versions import resolve
from parity.versions.client import one_line
from parity.versions.spec import Spec, checkout, parse, parse_all


@pytest.mark.parametrize(
    "text, spec",
    [
        ("trl==0.27.2", Spec("trl", "0.27.2")),
        (" liger_kernel == 0.7.0 ", Spec("liger-kernel", "0.7.0")),
        ("torch==2.13.0+cpu", Spec("torch", "2.13.0+cpu")),
        ("Cut.Cross-Entropy==25.1.1", Spec("cut-cross-entropy", "25.1.1")),
    ],
)
def test_a_release(text, spec):
    assert parse(text) == spec
    assert parse(str(spec)) == spec, "what is printed can be pasted"


@pytest.mark.parametrize(
    "text, says",
    [
        ("trl", "PKG==VER"),
        ("trl=0.27.2", "PKG==VER"),
        ("trl>=0.27.2", "PKG==VER"),
        ("trl==", "PKG==VER"),
        ("==1.0", "PKG==VER"),
        ("", "PKG==VER"),
        ("trl==latest", "'latest' is not a version"),
        ("trl==0.27.*", "'0.27.*' is not a version"),
        ("trl==1.0 liger==2", "is not a version"),
        ("trl @ /no/such/folder", "there is no folder '/no/such/folder'"),
        ("trl===1.0", "PKG==VER"),
    ],
)
def test_what_is_neither_is_refused_in_one_line(text, says):
    with pytest.raises(UsageError) as refusal:
        parse(text)
    message = str(refusal.value)
    assert says in message and repr(text) in message and "\n" not in message


def test_a_checkout(tmp_path):
    with pytest.raises(UsageError, match="no pyproject.toml or setup.py"):
        parse(f"trl @ {tmp_path}")
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    spec = parse(f"trl @ {folder}")
    assert spec == Spec("trl", path=folder) and parse(str(spec)) == spec
    assert "%20" in spec.requirement


def test_the_state_of_a_checkout(tmp_path):
    assert str(checkout(tmp_path)) == "no git revision"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "x", "--no-verify", "--date", "2001-01-01T00:00:00Z"], check=True)
    clean = checkout(tmp_path)
    assert clean.revision and not clean.dirty and clean.date.tzinfo
    (tmp_path / "file").write_text("2")
    assert str(checkout(tmp_path)) == clean.revision[:12] + "+changes"


def test_several_name_a_package_once():
    assert parse_all(["trl==1.0.0", "liger-kernel==0.7.0", "trl==1.0.0"])[0] == Spec("trl", "1.0.0")
    with pytest.raises(UsageError, match="both name trl; keep one"):
        parse_all(["trl==1.0.0", "TRL==1.1.0"])


def test_a_tools_message_becomes_one_line():
    message = "error: No solution found\n  cause: Because a was not found\n\nhint: look\nwarning: odd\n"
    assert one_line(message) == "No solution found · Because a was not found · hint: look"
    assert len(one_line("x" * 5000)) == 600


def test_every_dependency_of_the_harness_comes_with_an_environment():
    root = Path(parity.__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {canonicalize_name(Requirement(line).name) for extra in ("cli", "harness") for line in extras[extra]}
    elsewhere = {"llm-parity", "triton", "uv", *resolve.PARTNERS, *resolve.UNDECLARED, *resolve.TOOLS}
    assert names - elsewhere == set(resolve.HARNESS), "a core dependency belongs into resolve.HARNESS"
