"""A case by its id, from the rows of a run: in the folder of reports, in a folder inside it, or in one that is named."""

import json

import pytest
from msgspec import convert

from parity.case.case import Case
from parity.errors import UsageError
from parity.results.report.rows import Writer
from parity.results.row import About, Asked, Header, Row
from parity.sampling.find import find, only_one

CASE = Case("logprobs", 3, "bf16", {"V": 5})
ROW = {"case": CASE.id, "family": "logprobs", "implementation": "trl.selective_log_softmax", "dtype": "bf16"}
ROW |= {"device": "cpu", "verdict": "disagree", "seed": 3, "settings": {"V": 5, "B": 2, "T": 3, "H": 4}, "features": {}}
ROW |= {"replay": f"parity replay {CASE.id}"}


@pytest.mark.parametrize("folder", [".", "unsloth"])
def test_a_case_that_no_file_has_is_found_by_the_rows_of_its_run(folder, tmp_path):
    (tmp_path / folder).mkdir(exist_ok=True)
    with Writer(tmp_path / folder / "results.ndjson") as write:
        write(Header(header=About()))
        write(convert(ROW, Row))
    assert find(CASE.id, tmp_path) == (CASE, None)


def test_an_entry_of_the_runs_own_ledger_is_found(tmp_path):
    """`parity replay` said that there is no entry of this name; it knew the shipped ledger alone."""
    (tmp_path / "case.json").write_text(json.dumps({"case": CASE.to_json()}))
    entry = 'id = "mine"\nfamily = "logprobs"\nimplementations = ["loss.py:f"]\nquantities = ["logps"]\nreason = "r"\n'
    (tmp_path / "mine.toml").write_text(f'[[finding]]\n{entry}date = "2026-11-29"\ncase = "case.json"\nlink = "l"\n')
    with Writer(tmp_path / "results.ndjson") as write:
        write(Header(header=About(asked=convert({"ledger": str(tmp_path / "mine.toml")}, Asked))))
    assert find("mine", tmp_path) == (CASE, None)


def test_a_search_follows_the_one_implementation_of_an_entry():
    assert only_one("liger-luspo-padding") is None and only_one("nothing") is None
    assert only_one("liger-fused-frozen-hidden") == "liger.fused_linear_cross_entropy.mean"


def test_what_no_run_has_names_the_option(tmp_path):
    with pytest.raises(UsageError, match="--reports"):
        find(CASE.id, tmp_path)
