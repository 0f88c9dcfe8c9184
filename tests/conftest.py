"""What holds for every test: repeatable examples in CI, and no worker that outlives its test.

In CI the property tests draw the same examples every time; elsewhere they keep looking for new ones.
"""

import os
import re
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("repeatable")

WORKER = re.compile(r"checkpoint|evaluator|(target|drafter|loader)-\d+")
LEAVE_S = 10.0


@pytest.fixture(autouse=True)
def no_worker_outlives_its_test() -> Iterator[None]:
    """A worker that a test left hanging would pass the fault points of the next test, and take its faults."""
    yield
    for thread in threading.enumerate():
        if WORKER.fullmatch(thread.name):
            thread.join(LEAVE_S)
            assert not thread.is_alive(), f"{thread.name} is still there {LEAVE_S:g} s after its test"
