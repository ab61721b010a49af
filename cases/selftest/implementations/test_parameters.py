"""Every parameter of the library functions that adapters of loss families call takes two values, or is nobody's, or open:
named below.

A parameter that a new release brings fails here until a case moves it or it stands in a list.
"""

import contextlib
import inspect
import pkgutil
import sys
import types
from collections import defaultdict

import pytest
import torch

from cases.selftest.mutants.matrix import drawn
from parity.errors import Unsupported
from parity.protocol.call import fresh
from parity.registry import load, loss_families, loss_family
from parity.sampling.capabilities import nearest

NOBODYS = {
    "every case ignores the same label": "ignore_index",
    "how fast and in how much memory": "compiled inplace ce_impl ce_mode jsd_impl jsd_mode chunk_mem_const",
    "what is returned beside the loss": """return_z_loss return_token_accuracy return_predicted_tokens return_soft_hard_loss
        return_outputs""",
    "whether a graph is walked twice": "allow_retain_graph",
}
"""Why no case moves them -> parameters, of any function."""
LIGER, CHUNKED = "liger_kernel.ops", "liger_kernel.chunked_loss"
OPEN = {
    "cut_cross_entropy.linear_cross_entropy.linear_cross_entropy": "reduction",
    "cut_cross_entropy.torch_compile.torch_compile_linear_cross_entropy": "reduction shift",
    f"{CHUNKED}.grpo_loss.LigerFusedLinearGRPOLoss.forward": "ref_bias ref_input ref_weight",
    f"{LIGER}.cross_entropy.LigerCrossEntropyFunction.forward": "reduction weight",
    f"{LIGER}.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction.forward": "use_token_scaling",
    f"{LIGER}.fused_linear_jsd.LigerFusedLinearJSDFunction.forward": "accum_dtype",
    f"{LIGER}.fused_linear_kl_div.LigerFusedLinearKLDivFunction.forward": "accum_dtype eps reduction",
    f"{LIGER}.fused_linear_scaled_cross_entropy._FusedLinearPPOFallbackFunction.forward": "selected_token_ids",
    f"{LIGER}.kl_div.LigerKLDivLossFunction.forward": "eps log_target reduction",
    "torch.nn.functional.linear_cross_entropy": "label_smoothing",
    "trl.experimental.gkd.gkd_trainer.GKDTrainer.generalized_jsd_loss": "reduction",
    "trl.experimental.gold.gold_trainer.GOLDTrainer.generalized_jsd_loss": "logits_are_probs reduction",
}
"""Function -> parameters that change numbers and that no case moves yet."""
CASES, LARGEST = 60, 1 << 11
"""Of profile pr, and all that move what few functions take; those with so many logits at most."""
OBJECT = "a tensor, or another object"
VALUE = (bool, int, float, str, types.NoneType, torch.dtype)


def functions(source):
    """What a source names, as functions by name: those of a class that its callers meet; none for a Triton kernel."""
    try:
        found = pkgutil.resolve_name(source)
    except AttributeError:  # of another release
        return {}
    if inspect.isclass(found):
        names = ("forward",) if issubclass(found, torch.autograd.Function) else ("__init__", "forward")
        return {f"{source}.{n}": inspect.unwrap(getattr(found, n)) for n in names if hasattr(found, n)}
    return {source: inspect.unwrap(found)} if isinstance(found, types.FunctionType) else {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_parameter_of_a_library_function_is_moved_or_named():
    chosen = [i for i in load().values() if i.family in loss_families() and i.library and not (i.missing() or i.opt_in)]
    known = {f.__code__: name for i in chosen for s in i.sources for name, f in functions(s).items()}
    seen = defaultdict(lambda: defaultdict(set))

    def looking(frame, event, _):
        if event == "call" and (name := known.get(frame.f_code)):
            for parameter, value in frame.f_locals.items():
                seen[name][parameter].add(value if isinstance(value, VALUE) else OBJECT)
            if i.interpreted and not name.endswith("__init__"):
                raise Unsupported("the arguments are known")

    for family in map(loss_family, loss_families()):
        few = {name for name, setting in family.settings.items() if setting.few}
        found = list(drawn(family.name, 0))
        for case in (*found[:CASES], *(case for case in found[CASES:] if few & case.settings.keys())):
            s = family.full_settings(case)
            rows, length = family.sizes(s)
            for i in chosen if rows * length <= LARGEST else ():
                near = nearest(i, case, "cpu") if i.family == family.name else None
                if near is not None:
                    x = fresh(family.build(near))
                    with contextlib.suppress(Unsupported):
                        sys.setprofile(looking)
                        i.call(x)
                    sys.setprofile(None)

    nobodys = {name for names in NOBODYS.values() for name in names.split()} | {"self", "ctx", "cls"}
    left = {name: {"never called"} for name in known.values() if name not in seen}
    for name, values in seen.items():
        left[name] = {p for p, of in values.items() if len(of) == 1 and OBJECT not in of} - nobodys
    assert {name: of for name, of in left.items() if of} == {name: set(of.split()) for name, of in OPEN.items()}
