"""A case by its id, from the rows of a run: in the folder of reports, in a folder inside it, or in one that is named."""

import pytest
from msgspec import convert

from parity.case.case import Case
from parity.errors import UsageError
from parity.results.report.rows import writer
from parity.results.row import About, Header, Row
from parity.sampling.find import find

CASE = Case("logprobs", 3, "bf16", {"V": 5})
ROW = {"case": CASE.id, "family": "logprobs", "implementation": "trl.selective_log_softmax", "dtype": "bf16"}
ROW |= {"device": "cpu", "verdict": "disagree", "seed": 3, "settings": {"V": 5, "B": 2, "T": 3, "H": 4}, "features": {}}
ROW |= {"replay": f"parity replay {CASE.id}"}


@pytest.mark.parametrize("folder", [".", "unsloth"])
def test_a_case_that_no_file_has_is_found_by_the_rows_of_its_run(folder, tmp_path):
    (tmp_path / folder).mkdir(exist_ok=True)
    with writer(tmp_path / folder / "results.ndjson") as write:
        write(Header(header=About()))
        write(convert(ROW, Row))
    assert find(CASE.id, tmp_path) == (CASE, None)


def test_what_no_run_has_names_the_option(tmp_path):
    with pytest.raises(UsageError, match="--reports"):
        find(CASE.id, tmp_path)
