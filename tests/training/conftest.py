from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kakeya.loading import LoadedModel, load_model
from kakeya.models.checkpoint import Checkpoint, open_checkpoint
from kakeya.runtime import Runtime
from kakeya.training.conversations import Conversations
from kakeya.training.drafter import Request
from kakeya.training.settings import NetworkSettings
from kakeya.training.template import template_pieces
from kakeya.training.writing import ConversationWriter
from support.tiny import write_chat_model
from support.trainings import DATA, TRAINING, config_of


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


@pytest.fixture(scope="session")
def checkpoint(chat_model: Path) -> Checkpoint:
    return open_checkpoint(chat_model)


@pytest.fixture(scope="session")
def model(checkpoint: Checkpoint) -> LoadedModel:
    threads = torch.get_num_threads()
    loaded = load_model(checkpoint, config_of(), "tiny")
    torch.set_num_threads(threads)
    return loaded


@pytest.fixture(scope="session")
def conversations(model: LoadedModel, checkpoint: Checkpoint) -> Conversations:
    """What the tiny model says to itself."""
    pieces = template_pieces(model.tokenizer, model.model_config.eos_token_ids)
    with Runtime(model).start() as runtime:
        written = ConversationWriter(runtime, pieces, DATA).write(range(DATA.conversations))
        items = sorted(written, key=lambda each: each.number)
    return Conversations(DATA, checkpoint.fingerprint, pieces.ends, items)


@pytest.fixture
def request_for(chat_model: Path, tmp_path: Path) -> Callable[..., Request]:
    """Makes requests for trainings of the tiny model that write into the test's own directory."""

    def make(name: str = "drafter", **changes: object) -> Request:
        settings = {
            "model": str(chat_model),
            "output": tmp_path / name,
            "data_file": tmp_path / "conversations",
            "report_file": tmp_path / f"{name}.json",
            "engine": config_of(),
            "data": DATA,
            "network": NetworkSettings(block=4),
            "training": TRAINING,
            "command": "kakeya train drafter",
        }
        return Request(**(settings | changes))  # type: ignore[arg-type]

    return make
