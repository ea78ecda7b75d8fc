"""The table of cases in one process; `tests.cases` says what a case is."""

import pytest

from tests.cases import Job, all_cases, outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", all_cases(), ids=lambda case: f"{case.area}-{case.name}"
)
def test_one_process(case, tmp_path):
    outcome(case, Job("one process", tmp_path))
