"""Every field that TRL's configs have beside transformers' is moved by a case of some check, or nobody's, or open: named below.

A field that a new release brings fails here until a case moves it or it stands in a list.
"""

import dataclasses
from collections import defaultdict

import pytest
import transformers

from parity.errors import Unsupported
from parity.registry import load, run_case
from parity.trainers import catalogue
from parity.upstream import trl

WORDS = str.split
NOBODYS = {
    "how completions are generated, not what is made of them": WORDS(
        """cache_implementation ds3_gather_for_generation generation_kwargs min_p repetition_penalty top_k top_p
        use_transformers_paged use_vllm
        max_tool_calling_iterations chat_template_kwargs reward_model_path"""
    ),
    "what is loaded and tokenised": WORDS(
        """model_init_kwargs trust_remote_code teacher_model_name_or_path teacher_model_init_kwargs teacher_model_revision
        dtype dataset_num_proc dataset_kwargs dataset_text_field chat_template_path eos_token pad_token padding_value
        is_encoder_decoder"""
    ),
    "what is printed": WORDS(
        """log_completions log_completions_hub_repo log_multimodal log_unique_prompts num_completions_to_print
        generate_during_eval log_completions_steps wandb_log_unique_prompts diagnostics_flat_tolerance
        diagnostics_warning_interval callbacks"""
    ),
    "how long a queue or a server is waited for": WORDS(
        "heartbeat_stale_after_s max_inflight_tasks queue_maxsize request_timeout weight_sync_timeout"
    ),
    "in which order samples come": WORDS("shuffle_dataset generation_batch_size"),
    "needs an accelerator": WORDS("activation_offloading"),
    "random": WORDS("disable_dropout"),
    "how many references are computed at once": WORDS("precompute_ref_batch_size"),
    "an older name": WORDS("vllm_importance_sampling_cap"),
    "family policy moves it, in the config of the trainer whose loss it asks": WORDS(
        """delta epsilon epsilon_high importance_sampling_level off_policy_mask_threshold sapo_temperature_neg
        sapo_temperature_pos top_entropy_quantile vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos"""
    ),
    "family divergence moves it, as an argument": WORDS("loss_add_tail loss_top_k reverse_kl_top_1_mode"),
}
"""Why no check moves them -> fields, of any trainer, beside those of vLLM's server and engine."""
INHERITED = {"GMPOConfig": "GRPOConfig", "GKDConfig": "SFTConfig"}
"""Config -> the one whose fields it has too: they are asked of the other trainer."""
OPEN = {
    "DPOConfig": "padding_free",
    "ServerDistillationConfig": "pad_to_multiple_of",
    "GOLDConfig": """assistant_only_loss completion_only_loss eval_packing loss_type num_generations packing
        packing_strategy pad_to_multiple_of padding_free router_aux_loss_coef truncation_mode
        uld_crossentropy_weight uld_distillation_weight uld_hybrid_matched_weight uld_hybrid_unmatched_weight
        uld_skip_student_eos uld_skip_teacher_eos uld_use_hybrid_loss""",
    "IWOPDConfig": "iw_opd_epsilon max_prompt_length num_generations",
    "SDFTConfig": """generate_from_teacher num_generations_eval steps_per_generation teacher_prompt_template
        teacher_sync_steps use_teacher_server""",
    "SDPOConfig": """feedback_template mask_truncated_completions max_reprompt_len num_generations_eval
        remove_thinking_from_demonstration reprompt_template solution_template steps_per_generation
        teacher_sync_steps use_teacher_server""",
    "A2POConfig": "temperature",
    "AsyncGRPOConfig": "fork_threshold_tokens router_aux_loss_coef weight_sync_steps",
    "AsyncDistillationConfig": "add_tail_bucket weight_sync_steps",
    "CPOConfig": "max_completion_length",
    "ORPOConfig": "max_completion_length",
    "TPOConfig": "pad_to_multiple_of truncation_mode",
    "RewardConfig": "pad_to_multiple_of",
}
"""Config -> fields that change numbers and that no check looks at yet."""
CLOSED = WORDS("GRPOConfig RLOOConfig OnlineDPOConfig KTOConfig SFTConfig DistillationConfig GKDConfig GMPOConfig")
"""Configs without such a field."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_field_of_a_config_is_moved_or_named(monkeypatch):
    asked, configs = defaultdict(lambda: defaultdict(set)), {}
    original = trl.configured

    def configured(config, device, wanted):
        made = original(config, device, wanted)
        configs[config.__name__] = config
        for name in wanted:
            asked[config.__name__][name].add(repr(getattr(made, name, None)))
        raise Unsupported("the fields are known")

    monkeypatch.setattr(trl, "configured", configured)
    for implementation in load().values():
        if implementation.is_trainer and not implementation.id.endswith("fixed"):
            for case in catalogue.cases(implementation.family, "nightly", 0):
                if case.settings["check"] != "processes":
                    list(run_case(case, [implementation]))

    theirs = {f.name for f in dataclasses.fields(transformers.TrainingArguments)}
    known = {name for names in NOBODYS.values() for name in names}
    left = {}
    for name, config in configs.items():
        own = {f.name: f.default for f in dataclasses.fields(config) if f.name not in theirs}
        moved = {f for f, default in own.items() if asked[name][f] - {repr(default)}}
        there = own.keys() - (configs[INHERITED[name]].__dataclass_fields__.keys() if name in INHERITED else set())
        left[name] = sorted(f for f in there - moved - known if not f.startswith("vllm_"))
    assert left == {name: [] for name in CLOSED} | {name: sorted(fields.split()) for name, fields in OPEN.items()}
