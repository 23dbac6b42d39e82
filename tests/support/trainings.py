"""Settings of trainings that take a second."""

from kakeya.config import EngineConfig
from kakeya.training.settings import DataSettings, TrainingSettings
from support.tiny import engine_config

DATA = DataSettings(conversations=12, tokens=40, seed=3)
TRAINING = TrainingSettings(steps=16, batch=2, anchors=8, unroll=3, held_out=4, learning_rate=5e-3)


def config_of(**changes: object) -> EngineConfig:
    settings = {"window": 60, "capacity": 6, "threads": 1, "max_batch_tokens": 64}
    return engine_config(**(settings | changes))
