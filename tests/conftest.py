"""In CI the property tests draw the same examples every time; elsewhere they keep looking for new ones."""

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("repeatable")
