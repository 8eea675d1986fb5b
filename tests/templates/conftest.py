"""Property tests run without a deadline per example: machines that run tests are shared, and each test has a limit."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
