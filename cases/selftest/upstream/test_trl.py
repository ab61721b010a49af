"""What an installed TRL has is found, and what it lacks is said."""

import collections
import gc
import importlib
import logging
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
from packaging.version import Version

from cases.selftest.oracles import oracle_of
from parity.compare.one_case import interpreter_limit
from parity.errors import Unsupported
from parity.families.policy import FAMILY
from parity.implementations import interpreter, trl_trainer
from parity.implementations.trl import softcap
from parity.judging.assess import CaseOracle
from parity.registry import from_file, loss_family, run_case
from parity.trainers.rig import drive
from parity.upstream import trl


def test_a_trainer_whose_module_does_not_import_keeps_the_reason(monkeypatch):
    real = importlib.import_module

    def failing(name, *args):
        if name == "trl.experimental.orpo":
            raise ImportError("libfoo.so.2: cannot open shared object file")
        return real(name, *args)

    monkeypatch.setattr(trl.importlib, "import_module", failing)
    with pytest.raises(Unsupported, match=r"ORPOTrainer does not import: ImportError: libfoo.so.2"):
        trl.class_named.__wrapped__("ORPOTrainer")
    with pytest.raises(Unsupported, match="has no BrandNewTrainer"):
        trl.class_named.__wrapped__("BrandNewTrainer")
    assert trl.class_named.__wrapped__("CPOTrainer").__name__ == "CPOTrainer"
    assert trl.class_named.__wrapped__("OnlineDPOConfig").__name__ == "OnlineDPOConfig"


def test_a_subclass_that_passes_its_arguments_on_takes_what_its_base_takes():
    class Base:
        def __init__(self, model, reward_funcs=None): ...

    class Passing(Base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    class Fixed(Base):
        def __init__(self, model):
            super().__init__(model)

    assert [trl.accepts(kind, "reward_funcs") for kind in (Base, Passing, Fixed)] == [True, True, False]
    assert not trl.accepts(Passing, "judge")
    assert collections.Counter(trl.accepts(kind, "model") for kind in (Base, Passing, Fixed)) == {True: 3}


def test_a_field_that_the_version_lacks_is_left_out_unless_it_is_needed():
    config = trl.class_named("SFTConfig")
    made = trl.configured(config, "cpu", {"max_length": 12, "no_such_field": 1})
    assert (made.max_length, made.use_cpu, made.save_strategy) == (12, True, "no")
    with pytest.raises(Unsupported, match="SFTTrainer of the installed version has no no_such_field"):
        drive.needs("SFTTrainer", "max_length", "no_such_field")


@pytest.mark.parametrize("before", [None, "0"])
def test_quietness_is_taken_back(monkeypatch, capsys, before):
    from transformers.utils import logging as hugging_face

    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    if before is not None:
        monkeypatch.setenv("TQDM_DISABLE", before)
    bars = hugging_face.is_progress_bar_enabled()
    levels = [logging.getLogger(name).level for name in ("transformers", "trl")]
    with warnings.catch_warnings(record=True) as heard, trl.quiet():
        print("from TRL")
        logging.getLogger("transformers").setLevel(logging.CRITICAL)  # as a trainer's own log level does
        warnings.warn("from TRL", stacklevel=1)
        assert not hugging_face.is_progress_bar_enabled()
    assert capsys.readouterr().out == "" and not heard
    assert hugging_face.is_progress_bar_enabled() == bars
    assert [logging.getLogger(name).level for name in ("transformers", "trl")] == levels
    assert os.environ.get("TQDM_DISABLE") == before


def test_the_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("PARITY_KEPT", "1")
    with trl.environment_kept():
        os.environ["PARITY_KEPT"], os.environ["PARITY_NEW"] = "2", "3"
    assert os.environ["PARITY_KEPT"] == "1" and "PARITY_NEW" not in os.environ


def test_a_collection_within_looks_at_new_objects_alone():
    def failing():
        with trl.collecting_little():
            assert gc.get_freeze_count() > 1000
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("version, tanh", [("1.14.1", "ieee"), ("1.15.0", "sigmoid"), ("1.16.0", "ieee")])
def test_the_release_whose_chunks_are_triton_alone_has_its_tanh(monkeypatch, version, tanh):
    """With the tanh of torch the gradients of 1.15.0 under a softcap were 1.35 of what the gate allows: a false alarm."""
    monkeypatch.setattr(trl, "since", lambda wanted: Version(version) >= Version(wanted))
    case = loss_family("policy").case(1, "fp32", {"softcap": 42.5})
    assert trl.chunks_are_triton() is (tanh == "sigmoid")
    assert softcap(CaseOracle.of(loss_family("policy"), case, "cpu").inputs) == tanh


@pytest.mark.parametrize("version, interpreted", [("1.15.0", True), ("1.16.0", False)])
def test_the_trainer_whose_chunks_are_triton_alone_is_judged_as_a_kernel(version, interpreted):
    """1.15.0's bf16 gradients were 0.3 % low on the CPU, as Triton's interpreter truncates: a false alarm of an upgrade check."""
    program = f"""
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "{version}" if name == "trl" else real(name)
from parity.implementations import implementation, trl_trainer
from trl import GRPOTrainer
made = [implementation.REGISTRY["trl.GRPOTrainer"], trl_trainer.of_subclass(GRPOTrainer, "mine.py:Mine")]
print([one.interpreted for one in made])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == [str([interpreted] * 2)], done.stderr


@pytest.mark.parametrize(
    ("dtype", "settings", "why"),
    [
        ("bf16", {}, "truncates"),
        ("fp32", {"context": "autocast"}, "truncates"),
        ("fp32", {"context": "autocast_fp16"}, None),
        ("fp32", {}, None),
    ],
)
def test_what_a_kernel_stores_in_bf16_is_not_judged_in_the_interpreter(monkeypatch, dtype, settings, why):
    monkeypatch.setattr(interpreter, "truncates_bfloat16", lambda: True)
    family = loss_family("policy")
    case = family.case(1, dtype, settings)
    limit = interpreter_limit(family, case, CaseOracle.of(family, case, "cpu").inputs.settings)
    assert limit is None if why is None else why in (limit or "")


def test_what_a_version_reads_is_looked_for_in_its_loss_up_to_0_16_too():
    class Early:
        def compute_loss(self, model, inputs):
            return inputs["ref_per_token_logps"]

    class Late(Early):
        def _compute_loss(self, model, inputs):
            return inputs["old_per_token_logps"]

    assert trl.mentions('"ref_per_token_logps"', Early) and not trl.mentions("old_per_token_logps", Early)
    assert trl.mentions('"ref_per_token_logps"', Late) and trl.mentions("old_per_token_logps", Late)


def test_a_loss_made_at_run_time_has_no_source_to_look_into():
    made = {}
    exec("def compute_loss(self, model, inputs): return self.marked", made)
    own = type("Own", (trl.class_named("GRPOTrainer"),), {"compute_loss": made["compute_loss"]})
    assert trl.mentions("self.importance_sampling_level", own)
    assert not trl.mentions("self.marked", own)


def test_no_reference_model_is_copied_where_reference_log_probs_are_given(monkeypatch):
    module = sys.modules[trl.class_named("GRPOTrainer").__module__]
    monkeypatch.setattr(module, "create_reference_model", lambda model: "a copy", raising=False)
    with trl_trainer._without_reference_model():
        assert module.create_reference_model("a model") is None
    assert module.create_reference_model("a model") == "a copy"


@pytest.mark.parametrize(("context", "elementwise"), [("plain", "fp32"), ("autocast", "bf16")])
def test_before_1_15_logits_have_the_dtype_of_autocast(monkeypatch, context, elementwise):
    """`logits / temperature` and the log-softmax of bf16 logits, as in trl 1.13.0's _get_per_token_logps_and_entropies."""
    monkeypatch.setattr(trl, "since", lambda version: False)
    x = oracle_of(FAMILY.case(1, "fp32", {"context": context})).inputs
    assert trl_trainer._recipe(x).resolve("fp32").elementwise == elementwise


def test_a_liger_path_takes_an_advantage_for_each_completion_alone(monkeypatch):
    monkeypatch.setattr(trl, "mentions", lambda *_: True)
    monkeypatch.setattr(trl, "since", lambda release: False)
    said = {}
    for advantages in ("mixed", "token"):
        asked = FAMILY.full_settings(FAMILY.case(1, "fp32", {"advantages": advantages}))
        asked = SimpleNamespace(**vars(asked), dtype="fp32", device="cpu")
        said[advantages] = {limit(asked) for limit in trl_trainer._limits(liger=True)}
    refused = "its Liger path takes advantages of shape (B,) only"
    assert refused in said["token"] and refused not in said["mixed"]


SUBCLASSES = """
from trl import GRPOTrainer

class Rows(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **more):
        return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, 1, **more)

class Reversed(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *given, **more):
        found = super()._get_per_token_logps_and_entropies(model, input_ids.flip(0), attention_mask.flip(0), *given, **more)
        return [x if x is None else x.flip(0) for x in found]

class Exchanged(Reversed):
    def _get_per_token_logps_and_entropies(self, *given, **more):
        found = super()._get_per_token_logps_and_entropies(*given, **more)
        return [x if x is None else x.flip(0) for x in found]

class Cleaned(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *given, **more):
        cleaned = input_ids.where(attention_mask.bool(), 0)
        return super()._get_per_token_logps_and_entropies(model, cleaned, attention_mask, *given, **more)

class Packed(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *given, **more):
        model(input_ids=input_ids.flatten()[None])
"""


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("Rows", "agree"),
        ("Reversed", "agree"),
        ("Cleaned", "agree"),
        ("Exchanged", "disagree"),
        ("Packed", "unsupported"),
    ],
)
def test_a_subclass_may_score_sequences_in_parts_and_in_another_order(tmp_path, name, verdict):
    """The stored hidden states were those of all sequences in their order, whatever the model was given."""
    (tmp_path / "mine.py").write_text(SUBCLASSES)
    mine = next(i for i in from_file(f"{tmp_path}/mine.py:{name}") if i.family == "policy")
    case = FAMILY.case(5, "fp32", {"B": 4, "T": 6, "V": 11, "beta": 0.04, "lengths": [6, 3, 2, 5]})
    assert verdict in {row.verdict for row in run_case(case, [mine], thorough=False)} <= {verdict, "agree"}
