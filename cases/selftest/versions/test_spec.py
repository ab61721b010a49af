"""What may stand after `--with`, and that the refusal of anything else is one line that helps."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import parity
from parity.errors import UsageError
from parity.versions import resolve
from parity.versions.client import one_line
from parity.versions.releases import Release, parse, parse_all


@pytest.mark.parametrize(
    "text, spec",
    [
        ("trl==0.27.2", Release("trl", "0.27.2")),
        (" liger_kernel == 0.7.0 ", Release("liger-kernel", "0.7.0")),
        ("torch==2.13.0+cpu", Release("torch", "2.13.0+cpu")),
        ("Cut.Cross-Entropy==25.1.1", Release("cut-cross-entropy", "25.1.1")),
    ],
)
def test_a_release(text, spec):
    assert parse(text) == spec
    assert parse(str(spec)) == spec, "what is printed can be pasted"


@pytest.mark.parametrize(
    "text, says",
    [
        *((text, "PKG==VER") for text in ("trl", "trl=0.27.2", "trl>=0.27.2", "trl==", "==1.0", "", "trl===1.0")),
        ("trl @ /a/checkout", "PKG==VER"),
        ("trl==latest", "'latest' is not a version"),
        ("trl==0.27.*", "'0.27.*' is not a version"),
        ("trl==1.0 liger==2", "is not a version"),
        ("TRL==0.14.0", "is not supported: trl is from 0.15 on"),
    ],
)
def test_what_is_none_is_refused_in_one_line(text, says):
    with pytest.raises(UsageError) as refusal:
        parse(text)
    message = str(refusal.value)
    assert says in message and repr(text) in message and "\n" not in message


def test_several_name_a_package_once():
    assert parse_all(["trl==1.0.0", "liger-kernel==0.7.0", "trl==1.0.0"])[0] == Release("trl", "1.0.0")
    with pytest.raises(UsageError, match="are both of trl; keep one"):
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
