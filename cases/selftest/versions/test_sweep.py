"""Adapters and the releases that they claim: what a call says of an unknown signature, and every release in turn."""

import types

import pytest

from parity.errors import HarnessError
from parity.implementations import trl
from parity.implementations.implementation import Implementation
from parity.implementations.limits import taking
from parity.registry import family, load, run_case
from parity.results.report.rows import read
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment

RELEASES = {
    "trl": "0.15.2 0.17.0 0.20.0 0.22.2 0.24.0 0.26.2 0.28.0 0.29.1 1.1.0 1.5.0 1.6.0 1.9.2 1.10.0 1.13.0 1.14.2 1.16.0",
    "liger-kernel": "0.4.0 0.4.1 0.5.0 0.5.3 0.5.4 0.5.5 0.5.6 0.5.7 0.5.10 0.6.3 0.6.4 0.7.0 0.8.1 0.8.3 0.8.5",
    "cut-cross-entropy": "24.11.3 25.1.1",
    "unsloth-zoo": "2025.2.7 2025.5.11 2025.11.6 2026.1.4 2026.9.9 2026.10.9",
}
"""Each brings the others of its era, which are judged too.

The first and the last of each library, and the releases where the signature of something in `Implementation.sources` changed
(read from every wheel of Liger and cut-cross-entropy, the last of each minor of TRL and of each second month of
unsloth-zoo). TRL's configs change with every minor: there the functions alone decide, and the releases where a failure of
`parity history` begins or ends.
"""
SPECS = [f"{package}=={version}" for package, versions in RELEASES.items() for version in versions.split()]
PROFILE, LIMIT = "pr", 3600.0
"""Of the run in each environment; seconds of CPU time that it may take."""


@pytest.mark.slow
@pytest.mark.timeout(6 * LIMIT)
@pytest.mark.parametrize("spec", SPECS)
def test_no_release_is_unknown_to_an_adapter(spec, tmp_path):
    try:
        made = Environment.of([spec])
    except EnvironmentUnusable as error:
        pytest.skip(str(error))
    words = ["--profile", PROFILE, "--device", "cpu", "--no-minimise", "--reports", str(tmp_path)]
    done = made.run(["python", "-m", "parity", "run", *words], capture=True, cpu_limit=LIMIT)
    assert (tmp_path / "results.ndjson").exists(), done.stderr[-2000:]
    header, rows = read(tmp_path / "results.ndjson")
    assert header.end.complete and any(row.judged for row in rows)
    assert not [row for row in rows if row.blame == "harness"]


def adapter(call, **names):
    """A function as an adapter of the harness has it: its frame is the last one."""
    code = call.__code__.replace(co_filename=trl.__file__)
    return types.FunctionType(code, globals() | names, closure=call.__closure__)


def judged(call, library="trl"):
    """The only row of an implementation's call."""
    one = Implementation("a.b", "logprobs", "candidate", call, library=library)
    (row,) = run_case(family("logprobs").case(0, "fp32", {}), [one])
    return row


def test_a_signature_that_an_adapter_does_not_know_is_the_harnesss_fault():
    def narrow(hidden, weight):
        raise AssertionError("never called")

    def call(x):
        return {"logps": narrow(x.hidden, x.weight, x.ids)}

    row = judged(adapter(call, narrow=narrow))
    assert row.blame == "harness" and "positional arguments" in row.message


def test_a_setting_is_handed_over_where_the_signature_has_it_and_needed_only_where_it_is_moved():
    def older(x, beta=0.1):
        raise AssertionError

    assert taking(older, {"beta": (0.5, 0.0), "delta": (None, None)}) == {"beta": 0.5}
    with pytest.raises(HarnessError, match="declared as taken and is not: no delta parameter in the installed version"):
        taking(older, {"delta": (1.8, None)})


@pytest.mark.parametrize(("library", "blame"), [("trl", None), ("cut-cross-entropy", "harness")])
def test_a_module_that_the_library_lacks_is_absent_and_one_of_another_is_not(library, blame):
    def call(x):
        import trl.nowhere.deep  # noqa: F401

    row = judged(adapter(call), library)
    assert (row.blame, row.verdict) == (blame, "unsupported")


def test_every_release_that_is_swept_is_a_version_of_a_library_with_adapters():
    assert set(RELEASES) <= {i.library for i in load().values()}
