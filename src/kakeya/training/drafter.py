"""`train_drafter`: from a verifier's name to a drafter's file, by nothing but the verifier."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kakeya.config import NO_PROPOSER, EngineConfig
from kakeya.engine.backends import chosen_backend
from kakeya.engine.device import free_memory
from kakeya.errors import ConfigError
from kakeya.kernels.gpu import load_gpu_kernels
from kakeya.loading import LoadedModel, load_model
from kakeya.models.catalogue import CATALOGUE, resolve
from kakeya.models.checkpoint import Checkpoint, open_checkpoint
from kakeya.models.drafter import DrafterConfig, write_drafter
from kakeya.training.acceptance import Examiner
from kakeya.training.batches import Batches
from kakeya.training.conversations import (
    Conversation,
    Conversations,
    frequent_tokens,
    trained_length,
)
from kakeya.training.features import FeatureReader, FeatureStore, measure_standard, shards
from kakeya.training.gathering import Tell, WritingJob, gather
from kakeya.training.network import Network, Standard, folded
from kakeya.training.report import Report
from kakeya.training.settings import DataSettings, NetworkSettings, TrainingSettings
from kakeya.training.trainer import Frame, Trainer
from kakeya.training.verifier import SharedParts, rotation_tables
from kakeya.types import BackendChoice, KernelChoice, ShareBeginnings

BLOCKS = (4, 8)
_EXAMINATIONS = 4
_CUDA_STEP_TOKENS = 8192
_TRAINING_BYTES = 16 * 10**9
_HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Request:
    """All that a training is asked for. `engine` says where and how the verifier runs."""

    model: str
    output: Path
    data_file: Path
    report_file: Path
    engine: EngineConfig
    data: DataSettings
    network: NetworkSettings
    training: TrainingSettings
    command: str
    licence: str | None = None
    """What the drafter's file says; None is what the catalogue says of the model."""
    resume: bool = False
    only_write: bool = False
    writers: int = 1
    """Processes that write conversations, each with a verifier of its own."""

    @property
    def checkpoint_file(self) -> Path:
        return self.output.with_name(self.output.name + ".checkpoint")

    def __post_init__(self) -> None:
        for path in (self.output, self.data_file, self.report_file):
            if not path.absolute().parent.is_dir():
                raise ConfigError(f"{path} cannot be written: there is no directory {path.parent}")
        if self.resume and not self.checkpoint_file.exists():
            raise ConfigError(f"there is no training to go on with: {self.checkpoint_file} does not exist")
        if self.data.tokens > self.engine.cache.capacity:
            raise ConfigError(
                f"conversations of {self.data.tokens} tokens need a window that holds them; "
                f"this one holds {self.engine.cache.capacity}"
            )
        if self.writers < 1:
            raise ConfigError(f"writers must be at least 1, got {self.writers}")


def train_drafter(request: Request, tell: Tell) -> Report:
    """Write the conversations that are missing, compute features, train, examine, write drafter and report.

    Raises ModelError, and ConfigError for what cannot work.
    """
    config = _engine_config(request)
    checkpoint = open_checkpoint(resolve(request.model, config=config))
    shape = request.network.config_for(checkpoint.config, checkpoint.fingerprint)
    model = load_model(checkpoint, config, request.model, observed_layers=len(shape.taps))
    report = _new_report(request, model)
    with _timed(report, "writing"):
        job = WritingJob(
            request.model, config, checkpoint.fingerprint, request.data, request.data_file, request.writers
        )
        conversations = gather(job, model, tell)
    if not request.only_write:
        _Job(request, model, checkpoint, shape, conversations, report, tell).run()
    return report


def _engine_config(request: Request) -> EngineConfig:
    """No prefixes are shared, as each is used once; nothing is drafted; a device gets large steps."""
    config = chosen_backend(request.engine)
    large = _CUDA_STEP_TOKENS if config.backend is BackendChoice.CUDA else None
    return replace(
        config,
        proposer=NO_PROPOSER,
        share_beginnings=ShareBeginnings.OFF,
        max_batch_tokens=config.max_batch_tokens or large,
    )


def _new_report(request: Request, model: LoadedModel) -> Report:
    entry = CATALOGUE.get(request.model)
    licence = request.licence or (entry.licence if entry is not None else "that of the model it is for")
    kernels = model.facts.kernels
    return Report(request.model, request.command, licence, kernels, request.training, request.network)


@contextmanager
def _timed(report: Report, stage: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        report.seconds[stage] = round(time.monotonic() - began, 3)


class _Job:
    """One training over conversations that are there."""

    def __init__(
        self,
        request: Request,
        model: LoadedModel,
        checkpoint: Checkpoint,
        shape: DrafterConfig,
        conversations: Conversations,
        report: Report,
        tell: Tell,
    ) -> None:
        self._request, self._report, self._tell = request, report, tell
        self._shape, self._conversations = shape, conversations
        self._device = model.backend.pool.device
        self._reader = FeatureReader(model, shape.taps, request.data.tokens)
        usable = conversations.usable()
        count = min(request.training.held_out, max(1, int(_HELD_OUT_SHARE * len(usable))))
        self._held_out, self._trained = usable[:count], usable[count:]
        if not self._trained:
            raise ConfigError(f"of {len(conversations.items)} conversations too few have answers to train on")
        report.describe_data(conversations, count)
        report.describe_drafter(shape)
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        draft_vocab = frequent_tokens(self._trained, shape.draft_vocab_size, shape.vocab_size)
        self._shared = SharedParts.of(checkpoint, self._device, dtype).guessing(torch.from_numpy(draft_vocab))

    def run(self) -> None:
        with _timed(self._report, "features"):
            standard = measure_standard(self._reader, self._trained)
            examiner = self._examiner(standard)
            batches = self._batches(standard)
        frame = self._frame(standard)
        trainer = Trainer(frame, self._request.training, batches)
        if self._request.resume:
            trainer.resume(self._request.checkpoint_file)
        with _timed(self._report, "training"):
            self._train(trainer, frame, examiner)
        self._finish(trainer, standard)

    def _frame(self, standard: Standard) -> Frame:
        positions = self._request.data.tokens + self._shape.block + self._request.training.unroll + 2
        rotations = rotation_tables(self._shared.model, positions, self._device)
        return Frame(self._shape, self._shared, standard, rotations, self._shared.head.dtype)

    def _examiner(self, standard: Standard) -> Examiner:
        lengths = [len(each.tokens) for each in self._held_out]
        store = self._store(standard, self._held_out, lengths, "features of held-out conversations")
        kernels = load_gpu_kernels(self._device, KernelChoice.AUTO)
        return Examiner(self._conversations, self._held_out, store, self._shared, kernels)

    def _batches(self, standard: Standard) -> Batches:
        lengths = [trained_length(each) for each in self._trained]
        parts = shards(lengths, self._reader.width, _feature_budget(self._device))

        def load(part: range) -> FeatureStore:
            conversations = self._trained[part.start : part.stop]
            return self._store(standard, conversations, lengths[part.start : part.stop], "features")

        batches = Batches(self._request.training, parts, load)
        batches.at(0, 1)  # computes the first shard
        return batches

    def _store(
        self, standard: Standard, conversations: Sequence[Conversation], lengths: Sequence[int], stage: str
    ) -> FeatureStore:
        def tell(done: int, total: int) -> None:
            self._tell(stage, done / total, f"{total:,} tokens")

        return FeatureStore(self._reader, standard, conversations, lengths, tell)

    def _train(self, trainer: Trainer, frame: Frame, examiner: Examiner) -> None:
        examined = int(trainer.share * _EXAMINATIONS)
        for progress in trainer.run(self._request.checkpoint_file):
            self._report.add_progress(progress)
            last = self._report.curve[-1]
            words = " ".join(f"{share:.2f}" for share in last["acceptance"])
            self._tell(
                "training", progress.share, f"step {last['step']}, loss {last['loss']:.3f}, right {words}"
            )
            if int(progress.share * _EXAMINATIONS) > examined and progress.share < 1:
                examined = int(progress.share * _EXAMINATIONS)
                self._examine(trainer.step, frame.network(trainer.averaged), examiner)
        self._examine(trainer.step, frame.network(trainer.averaged), examiner)

    def _examine(self, step: int, network: Network, examiner: Examiner) -> None:
        blocks = [block for block in BLOCKS if block <= self._shape.block] or [self._shape.block]
        self._report.add_examination(step, examiner.examine(network, blocks))
        self._report.write(self._request.report_file)

    def _finish(self, trainer: Trainer, standard: Standard) -> None:
        weights = folded(trainer.averaged, standard)
        draft_vocab = self._shared.draft_vocab
        write_drafter(self._request.output, self._shape, weights, draft_vocab, self._report.notes())
        self._report.write(self._request.report_file)
        self._request.checkpoint_file.unlink(missing_ok=True)


def _feature_budget(device: torch.device) -> int:
    """Bytes that features may take; the rest is for training itself, and on a host for others."""
    free = free_memory(device)
    return free // 4 if device.type != "cuda" else max(free - _TRAINING_BYTES, free // 4)
