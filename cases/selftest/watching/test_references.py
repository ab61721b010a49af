"""References, right and wrong ones."""

from cases.selftest.watching.runs import of, watched


def test_a_reference_that_is_the_policy_is_seen_once(tmp_path):
    trainer = of("dpo-trainer", max_steps=1)
    trainer.ref_model = trainer.model
    watch, _ = watched(trainer, tmp_path)
    assert [f.what for f in watch.findings] == ["update"]
    assert "the optimizer's step moves the reference too" in watch.findings[0].text
