"""A plugin of pytest: the process that hands tests out runs none, so it needs no conftest file, nor torch."""

import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Those that run the tests come here too, and load all."""
    options = early_config.known_args_namespace
    if "PYTEST_XDIST_WORKER" not in os.environ and getattr(options, "numprocesses", None):
        options.noconftest = True
