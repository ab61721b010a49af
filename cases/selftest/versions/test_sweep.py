"""What became of an adapter in a release: the states, and how an adapter binds by the installed signature."""

import dataclasses
import types

import pytest

from parity.errors import Unsupported
from parity.implementations.implementation import Implementation, taking
from parity.versions.commands import sweep


def call(verdict, message="", blame=None, case="plain"):
    return sweep.Call("a.b", "a", "1", case, verdict, message, blame)


@pytest.mark.parametrize(
    ("calls", "state"),
    [
        ([call("ran"), call("unsupported", "the adapter a.b does not fit", "harness", "beta=0.5")], "unknown"),
        ([call("unsupported", "no beta"), call("ran")], "judged"),
        ([call("crashed", "IndexError")], "judged"),
        ([call("refused", "ValueError"), call("unsupported", "no bias")], "refused"),
        ([call("unsupported", "no trl.kernels in the installed version")], "absent"),
        ([call("unsupported", "bf16 only")], "nothing"),
    ],
)
def test_one_unknown_call_makes_the_adapter_unknown_and_one_that_ran_makes_it_judged(calls, state):
    assert sweep.cell(calls).state == state


def test_an_adapter_that_does_not_know_a_signature_is_unknown(monkeypatch):
    def narrow(hidden, weight):
        raise AssertionError("never called")

    def call(x):
        return {"logps": narrow(x.hidden, x.weight, x.ids)}

    # as an adapter of the harness: its frame is the last one
    code = call.__code__.replace(co_filename=sweep.__file__)
    adapter = types.FunctionType(code, globals() | {"narrow": narrow}, closure=call.__closure__)
    one = Implementation("a.b", "logprobs", "candidate", adapter, library="trl")
    monkeypatch.setattr(sweep, "load", lambda: {"a.b": one})
    monkeypatch.setattr(sweep, "loss_families", lambda: ("logprobs",))
    found = list(sweep.calls())
    assert sweep.cell(found).state == "unknown"
    assert "positional arguments" in sweep.cell(found).why
    seen = {"trl": {"a.b": {"1.0": sweep.cell(found)}}}
    assert sweep.exit_code(seen, []) == 1
    assert "| `a.b` | **U** |" in sweep.markdown(seen, [])
    fine = {"trl": {"a.b": {"1.0": dataclasses.replace(sweep.cell(found), state="judged")}}}
    assert sweep.exit_code(fine, []) == 0
    assert sweep.exit_code(fine, ["trl==9: does not exist"]) == 3


def test_a_setting_is_handed_over_where_the_signature_has_it_and_needed_only_where_it_is_moved():
    def older(x, beta=0.1):
        raise AssertionError

    assert taking(older, {"beta": (0.5, 0.0), "delta": (None, None)}) == {"beta": 0.5}
    with pytest.raises(Unsupported, match="no delta parameter in the installed version"):
        taking(older, {"delta": (1.8, None)})


@pytest.mark.parametrize(("library", "verdict"), [("trl", "absent"), ("cut-cross-entropy", "unknown")])
def test_a_module_that_the_library_lacks_is_absent_and_one_of_another_is_not(library, verdict, monkeypatch):
    def call(x):
        import trl.nowhere.deep  # noqa: F401

    adapter = types.FunctionType(call.__code__.replace(co_filename=sweep.__file__), globals())
    one = Implementation("a.b", "logprobs", "candidate", adapter, library=library)
    monkeypatch.setattr(sweep, "load", lambda: {"a.b": one})
    monkeypatch.setattr(sweep, "loss_families", lambda: ("logprobs",))
    assert sweep.cell(list(sweep.calls())).state == verdict


def test_every_release_that_is_swept_is_a_version_of_a_library_with_adapters():
    libraries = {i.library for i in sweep.load().values()}
    assert set(sweep.RELEASES) <= libraries
