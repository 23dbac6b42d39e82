"""What every test may use: the default model, quiet threads, and hypothesis without surprises."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch

from kakeya.config import DEFAULT_MODEL
from kakeya.models import catalogue

# Tests never look a model up on a hub; libraries that would like to are told so.
os.environ["HF_HUB_OFFLINE"] = "1"

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The real default model. It comes through our own code and stays in the user's cache directory."""
    return catalogue.resolve(DEFAULT_MODEL)
