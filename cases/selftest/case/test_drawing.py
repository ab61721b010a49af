"""What profile pr draws: every dimension away from its default, every pair of dimensions together, every choice."""

from __future__ import annotations

import collections
import functools
import importlib
import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from cases.selftest.mutants.matrix import drawn as drawn_cases
from parity.case.case import Case
from parity.families.policy_settings import GROUPS
from parity.judging.oracle import exact
from parity.registry import family

FLOOR = 0.03
"""Share of the cases in which each dimension is away from its default; the rarest, a policy's context, has 0.06."""
OF_ONE_LOSS = {
    "sapo": ("sapo_temperature_neg", "sapo_temperature_pos"),
    "vespo": ("vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"),
    "dr_grpo": ("max_completion_length",),
    "clipped": ("delta", "epsilon"),
    "clipped or cispo": ("epsilon_high",),
    "of a window": ("other_tokens", "steps_per_generation"),
}
"""Policy losses -> the settings that they alone have."""
OVERLAP = {
    ("dr_grpo", "clipped"),
    ("clipped", "clipped or cispo"),
    ("dr_grpo", "clipped or cispo"),
    ("vespo", "of a window"),
}
OVERLAP |= {("clipped", "of a window"), ("clipped or cispo", "of a window")}
APART = {
    tuple(sorted(pair)): f"settings of {a} and of {b} losses"
    for a, b in itertools.combinations(OF_ONE_LOSS, 2)
    if (a, b) not in OVERLAP
    for pair in itertools.product(OF_ONE_LOSS[a], OF_ONE_LOSS[b])
}
SPARSE, DENSE = ("k", "ragged", "tail"), ("extra_vocabulary", "num_items", "other_tokens", "teacher")
EXCLUDED = {
    "logprobs": dict.fromkeys(
        (tuple(sorted(("rare", n))) for n in ("level", "padded_rows", "bias", "logit_scale", "softcap", "temperature")),
        "a rare block is one of a plain head",
    ),
    "policy": dict.fromkeys(
        (("head", "head_dtype"), ("head_dtype", "lora_rank")),
        "a tied head and a LoRA adapter have the dtype of the model",
    )
    | APART,
    "divergence": {
        ("extra_vocabulary", "sparse"): "a sparse teacher names tokens of the student's vocabulary",
        ("num_items", "sparse"): "TRL's server losses divide by their own label positions",
        ("other_tokens", "sparse"): "TRL's server losses divide by their own label positions",
        ("sparse", "teacher"): "a sparse teacher hands out no logits",
        ("gap", "teacher_H"): "a teacher like the student has its hidden size",
        ("gap", "teacher_peak"): "a teacher like the student has its logits",
    }
    | {tuple(sorted(pair)): "of a sparse teacher, and of a dense one" for pair in itertools.product(SPARSE, DENSE)},
}
"""Family -> pairs of dimensions that exclude each other by definition, with the reason."""
TF32 = {("context", "tf32"): "CPUs have none: on CUDA a share of the float32 cases runs a second time with it"}
SLOW = TF32 | {("context", "compile"): "torch.compile takes seconds a case and is left to the long profiles"}
SCALAR = SLOW | {
    ("cotangent", kind): "the upstream gradient of one scalar is one number" for kind in ("sparse", "rows")
}
UNDRAWN = {"logprobs": SLOW, "policy": SCALAR, "divergence": SCALAR}
"""Family -> values that profile pr does not draw, with the reason."""
FEATURES = {
    "logprobs": "one token, V = 1, V beyond a chunk, cap active, V off block",
    "policy": "one sequence, ragged, padding, empty row, all masked, V = 1, cap active, one position, delta active, kl, "
    "old given, cap below the clip",
    "divergence": "one token, V = 1, cap active, student excludes, teacher excludes, both exclude",
}
"""Family -> facts of its features that must be drawn both ways."""


@functools.cache
def stream(name: str) -> list[Case]:
    return list(drawn_cases(name, 0))


@functools.cache
def full(name: str) -> list[SimpleNamespace]:
    """The settings of each case of a stream, and its dtype."""
    return [SimpleNamespace(**vars(family(name).full_settings(c)), dtype=c.dtype) for c in stream(name)]


@functools.cache
def moved(name: str) -> list[set[str]]:
    """The dimensions of each case that are away from their default."""
    return [set(case.settings) | ({"dtype"} if case.dtype != "fp32" else set()) for case in stream(name)]


@pytest.fixture(params=sorted(EXCLUDED))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def _dimensions(name: str) -> set[str]:
    """Those that most functions take: pairs with the others come to who takes them besides the draws."""
    return {name for name, setting in family(name).settings.items() if not setting.few} | {"dtype"}


@pytest.mark.parametrize("name", ["divergence", "logprobs"])
def test_what_few_functions_take_is_in_a_share_of_the_cases(name: str) -> None:
    found, few = stream(name), {n: s for n, s in family(name).settings.items() if s.few}
    having = [case for case in found if few.keys() & case.settings.keys()]
    assert len(found) / 40 < len(having) < len(found) / 10
    seen = {(n, case.settings[n]) for case in having for n in few if n in case.settings}
    assert seen == {(n, value) for n, setting in few.items() for value in setting.few}
    one_by_one = {n: family(name).case(1, "fp32", {n: setting.few[0]}) for n, setting in few.items()}
    assert all(n in family(name).needed(family(name).build(case)) for n, case in one_by_one.items())


def test_every_dimension_is_away_from_its_default_often_enough(name: str) -> None:
    counts = collections.Counter(itertools.chain(*moved(name)))
    shares = {dimension: counts[dimension] / len(stream(name)) for dimension in _dimensions(name)}
    assert {dimension: share for dimension, share in shares.items() if share < FLOOR} == {}


def test_every_pair_of_dimensions_occurs_unless_they_exclude_each_other(name: str) -> None:
    seen = {pair for of in moved(name) for pair in itertools.combinations(sorted(of), 2)}
    pairs = set(itertools.combinations(sorted(_dimensions(name)), 2))
    assert sorted(pairs - seen - EXCLUDED[name].keys()) == []
    assert sorted(seen & EXCLUDED[name].keys()) == []


def test_every_choice_and_dtype_occurs(name: str) -> None:
    wanted = {(n, choice) for n, setting in family(name).settings.items() for choice in setting.choices or ()}
    seen = {(n, getattr(s, n)) for s in full(name) for n, _ in wanted}
    assert sorted(wanted - seen - UNDRAWN[name].keys(), key=str) == []
    assert {s.dtype for s in full(name)} == {"fp32", "fp16", "bf16"}


def test_sizes_at_which_kernels_change_their_path(name: str) -> None:
    """Rows, vocabulary and hidden sizes beyond a tile, in 16 bit too; a last tile that is full, or of one token, behind a full
    one, among all tokens and in a row."""
    of, narrow = full(name), [s for s in full(name) if s.dtype != "fp32"]
    assert any(s.B * s.T > 512 for s in narrow) and any(s.B * s.T > 1024 for s in of)
    assert any(s.H > 256 and s.H % 16 for s in narrow)
    assert any(s.V > 16384 for s in of)
    for sizes in ([s.B * s.T for s in of], [s.T for s in of]):
        for tile, left in itertools.product((32, 64, 128), (0, 1)):
            assert any(n > tile and n % tile == left for n in sizes), (tile, left)


def test_what_changes_logits_meets_sizes_beyond_a_chunk_and_a_tile(name: str) -> None:
    """A vocabulary beyond 4,096, and more than 128 tokens, each beside every setting of the logits and every kind of bias."""
    wanted = {*"level padded_rows temperature softcap logit_scale head_dtype random banned wide".split()}
    for large in (lambda s: s.V > 4096, lambda s: s.B * s.T > 128):
        here = [(of, s) for of, s in zip(moved(name), full(name), strict=True) if large(s)]
        met = set[str]().union(*(of | {s.bias, "wide" if s.H > 16 else ""} for of, s in here))
        assert wanted - met == set()


def test_every_fact_is_drawn_both_ways(name: str) -> None:
    features = [family(name).features(case) for case in stream(name)]
    assert not features[0].keys() & family(name).settings.keys()  # a ledger scope names either
    for fact in FEATURES[name].split(", "):
        assert {bool(found[fact]) for found in features} == {True, False}, fact


def test_every_loss_type_meets_every_dimension() -> None:
    """The policy family is eight losses: each with each dimension away from its default, other than those excluded."""
    found = stream("policy")
    names = _dimensions("policy") - {"loss_type", "dtype"}
    seen = {(case.settings.get("loss_type", "grpo"), name) for case in found for name in case.settings}
    losses = family("policy").settings["loss_type"].choices or ()
    clipped = {"grpo", "bnpo", "dr_grpo", "dapo", "luspo"}
    who = {"clipped": clipped, "clipped or cispo": {*clipped, "cispo"}, "of a window": {"dapo", "cispo", "vespo"}}
    absent = {
        (loss, name)
        for kind, settings in OF_ONE_LOSS.items()
        for loss, name in itertools.product({*losses} - who.get(kind, {kind}), settings)
    }
    assert sorted(set(itertools.product(losses, names)) - seen - absent) == []
    assert not seen & absent


def test_every_group_of_policy_settings_moves_nearly_alone() -> None:
    """With the loss type and at most one more group, each at least twice, in a quarter of the cases: a failure of one setting
    then hides behind no other. Batches without a loss token come often enough to meet every metric."""
    found = stream("policy")
    moved = [[group for group in GROUPS if case.settings.keys() & set(group)] for case in found]
    few = [groups for groups in moved if len(groups) <= 2]
    counts = collections.Counter(group for groups in few for group in groups)
    assert len(few) >= len(found) / 4
    assert {group: counts[group] for group in GROUPS if counts[group] < 2} == {}
    assert sum(not any(case.settings.get("lengths", [1])) for case in found) >= 20


def test_rows_are_as_long_as_completions_are() -> None:
    """A counter in 16 bits, a sum of lengths in float16, a block of 2,048: of policy losses and of the others."""
    lengths = {name: [s.T for s in full(name)] for name in (*EXCLUDED, "preference")}
    assert {name for name, of in lengths.items() if sum(n > 2048 for n in of) < 3} == set()
    assert sum(n > 32768 for of in lengths.values() for n in of) >= 3


def test_rare_values_of_a_policy_loss_are_met() -> None:
    """An upper clip of zero, a reference close to the policy, a cap of the ratio below the upper clip."""
    of = full("policy")
    assert sum(s.epsilon_high == 0 and s.old != "absent" for s in of) >= 3
    assert sum(s.ref == "close" and s.beta != 0 for s in of) >= 30
    caps = [s for s in of if s.delta is not None]
    below = [s for s in caps if s.delta <= 1 + (s.epsilon if s.epsilon_high is None else s.epsilon_high)]
    assert len(below) > 10 and len(caps) > 3 * len(below)


def test_often_the_only_possible_token_is_the_label() -> None:
    of = family("logprobs")
    few = [c for c in stream("logprobs") if c.settings.get("bias") == "banned" and c.settings.get("V") == 2]
    plain = [c for c in few if not {"temperature", "softcap", "logit_scale", "ignored"} & c.settings.keys()]
    alone = [c for c in plain if int((of.build(c).bias == -torch.inf).sum()) == 1]
    assert len(alone) > 2


def test_tokens_that_the_sampler_did_not_score_decide_about_their_sequence() -> None:
    """A mean that leaves them out is above the threshold, where it is at most that with zeros in their places."""
    settings = {"B": 16, "T": 9, "off_policy_mask_threshold": 1.0, "sampler": "nan", "beta": 1.0}
    settings |= {"advantages": "negative"}
    x = family("policy").build(family("policy").case(3, "fp32", settings))
    lp = exact(family("policy"), x)["_logps"]
    gap = x.sampling_logps.double() - lp
    left_out = gap.nanmean(-1) > 1.0
    kept = gap.nan_to_num(nan=0.0).mean(-1) <= 1.0
    assert int((kept & left_out).sum()) > 4 and int((~kept).sum()) > 4


STREAM = """
from hypothesis import strategies as st
from parity.case.drawing import batch
found = []
for number in range(80):
    found += batch(st.integers(0, 1 << 20), str(number))
"""


def test_one_seed_draws_the_same_cases_whatever_is_loaded(tmp_path, monkeypatch):
    """Hypothesis takes one number in twenty from constants of local modules: a user's file moved the stream."""
    (tmp_path / "my_module.py").write_text("TABLE = [3, 5, 11, 13, 17, 23, 29, 31, 37, 63, 65, 97, 257, 1023, 54321]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "my_module", importlib.import_module("my_module"))
    here = {}
    exec(STREAM, here)
    done = subprocess.run([sys.executable, "-c", STREAM + "print(*found)"], capture_output=True, text=True, check=True)
    alone = [int(word) for word in done.stdout.split()]
    assert len(alone) >= 600 and alone == here["found"]
