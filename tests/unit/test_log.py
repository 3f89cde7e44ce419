"""What is told through Python's logging."""

from __future__ import annotations

import pytest

from streamshim import log


@pytest.mark.parametrize("level", ["debug", "warning", "error", "exception"])
def test_a_record_names_the_line_that_told_it(caplog, level):
    caplog.set_level("DEBUG", logger=log.NAME)
    try:
        raise ValueError("out of order")
    except ValueError:
        getattr(log, level)("it is %s", level)
    (record,) = caplog.records
    assert (record.getMessage(), record.filename) == (f"it is {level}", "test_log.py")
    assert (record.exc_info is not None) is (level == "exception")
