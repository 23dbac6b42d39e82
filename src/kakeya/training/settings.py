"""What a training is asked for: the data, the network and the budget. Checked once, where they are made."""

from dataclasses import dataclass

from kakeya.errors import ConfigError
from kakeya.models.config import ModelConfig
from kakeya.models.drafter import DrafterConfig, DrafterKind
from kakeya.training.openings import OPENINGS

_TAPS = 5
# Beyond these, a token costs more in every guess than it gains in the few that it would be right in.
_DRAFT_VOCAB = 16_384
_LAST_SEED = 2**31 - 1  # a conversation's own seed has its number beside it


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name.replace('_', '-')} must be at least {least}, got {value}")


@dataclass(frozen=True)
class DataSettings:
    """The conversations that the verifier writes: so many, each of at most so many tokens."""

    conversations: int = 20_480
    tokens: int = 512
    seed: int = 0
    openings: tuple[str, ...] = OPENINGS
    """Words that the first user of most conversations begins with; with none the model asks what it likes."""

    def __post_init__(self) -> None:
        _at_least(8, conversations=self.conversations)
        _at_least(32, conversation_tokens=self.tokens)
        if not 0 <= self.seed <= _LAST_SEED:
            raise ConfigError(f"seed must be from 0 to {_LAST_SEED}, got {self.seed}")


@dataclass(frozen=True)
class NetworkSettings:
    """The drafter: what it is, how many layers it has, and how many tokens it drafts at most."""

    kind: DrafterKind = "steps"
    block: int = 8
    layers: int | None = None
    """None is what suits the kind: one layer for steps, three for a block."""
    width: int | None = None
    """The inner size of its layers; None is the verifier's."""
    draft_vocab: int = _DRAFT_VOCAB
    """The most tokens that it can guess: those that the conversations have most often."""

    def __post_init__(self) -> None:
        if self.kind not in ("steps", "block"):
            raise ConfigError(f"kind must be steps or block, got {self.kind!r}")
        _at_least(2, block=self.block)
        _at_least(1, draft_vocab=self.draft_vocab)
        if self.layers is not None:
            _at_least(1, layers=self.layers)
        if self.width is not None:
            _at_least(1, width=self.width)

    def config_for(self, model: ModelConfig, verifier: str) -> DrafterConfig:
        """The drafter's shape for a verifier. Raises ConfigError for one that cannot have a drafter."""
        if model.layer_heads:
            raise ConfigError(
                f"{model.family} models, whose layers have heads of different sizes, cannot have a drafter"
            )
        return DrafterConfig(
            kind=self.kind,
            taps=default_taps(model.num_layers),
            block=self.block,
            layers=self.layers or (1 if self.kind == "steps" else 3),
            hidden_size=model.hidden_size,
            intermediate_size=self.width or model.intermediate_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            vocab_size=model.vocab_size,
            draft_vocab_size=min(self.draft_vocab, model.vocab_size),
            norm_eps=model.norm_eps,
            verifier=verifier,
        )


def default_taps(layers: int) -> tuple[int, ...]:
    """An early layer, the last one, and three evenly between: 2, 9, 16, 23 and 29 of 30. All of five or
    fewer."""
    if layers <= _TAPS:
        return tuple(range(layers))
    first, last = min(2, layers // 6), layers - 1
    between = _TAPS - 1
    return tuple(first + -(-(last - first) * place // between) for place in range(_TAPS))


@dataclass(frozen=True)
class TrainingSettings:
    """How long and how the network is trained. Exactly one of `steps` and `minutes` is the budget.

    A training step takes `batch` conversations, and in each a run of `anchors` neighbouring positions to
    draft from. A drafter that goes step by step is unrolled for `unroll` steps.
    """

    steps: int | None = 3000
    minutes: float | None = None
    batch: int = 64
    anchors: int = 128
    unroll: int = 6
    learning_rate: float = 1.5e-3
    held_out: int = 384
    seed: int = 0
    compiled: bool = False
    """Whether the loss is compiled: less time for each step, after some for compiling."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("either steps or minutes is the budget of a training, not both")
        if self.steps is not None:
            _at_least(1, steps=self.steps)
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes must be above 0, got {self.minutes}")
        _at_least(1, batch=self.batch, anchors=self.anchors, unroll=self.unroll, held_out=self.held_out)
        if not 0 < self.learning_rate < 1:
            raise ConfigError(f"learning-rate must be between 0 and 1, got {self.learning_rate}")
