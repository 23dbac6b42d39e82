"""`kakeya propose`: serves proposers to verifiers on other machines."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.cli.command import ENVIRONMENT_PREFIX, command_of
from kakeya.cli.console import FetchBar, Screen, human_bytes
from kakeya.cli.fronts import live_alone, shows_settings
from kakeya.cli.grpc_options import GrpcOptions, listening
from kakeya.cli.memory import DEFAULT_BUDGETS, MOST_BY_DEFAULT, Budget, fitting_capacity
from kakeya.config import MODEL, NGRAM, EngineConfig
from kakeya.options import ComputeOptions, memory

if TYPE_CHECKING:
    from kakeya.loading import LoadedModel
    from kakeya.metrics import ProposerMetrics
    from kakeya.models.checkpoint import Checkpoint
    from kakeya.proposers.blocks import BlockMaker

_proposing = partial(typer.Option, rich_help_panel="What guesses")


def register(app: typer.Typer) -> None:
    app.command(
        "propose",
        help="Guess tokens for a `kakeya serve` elsewhere, which names this one as its --proposer "
        "remote:HOST:PORT. Every flag has a KAKEYA_ environment twin; the flag wins.",
        context_settings={"auto_envvar_prefix": ENVIRONMENT_PREFIX},
    )(command_of(ProposeOptions, propose))


@dataclass(frozen=True)
class ProposeOptions(GrpcOptions, ComputeOptions):
    """What `kakeya propose` was asked for: one field per flag."""

    model: Annotated[
        str,
        _proposing(help="The verifier's model, for proposers that share weights with it; others need none."),
    ] = ""
    proposer: Annotated[
        str,
        _proposing(
            help="`ngram` (looks tokens up in the session), `model:PATH` (a model with the verifier's "
            "tokenizer), `drafter` or `drafter:PATH` (trained for --model), or several joined by `+`."
        ),
    ] = NGRAM
    bind: Annotated[str, listening(help="HOST:PORT.")] = "127.0.0.1:50061"
    capacity: Annotated[
        int | None,
        memory(help="Sessions whose state is in memory at once; what the budget holds when left out."),
    ] = None
    memory_budget: Annotated[
        str | None, memory(help="Memory for them: 8GB, 512MiB, or a share of what is free.")
    ] = None


def propose(context: typer.Context, options: ProposeOptions) -> None:
    """Check every setting, then listen, load, serve and drain."""
    screen = Screen()
    if shows_settings(screen, context, options):
        return
    config, load = options.server_config(), _loader(screen, options)
    # Imported here because they take a while to import, and help should not wait for them.
    from kakeya.grpc_server.proposer_server import ProposerServer
    from kakeya.metrics import ProposerMetrics

    live_alone(screen, options, config, ProposerMetrics(), ProposerServer, load, _banner)


def _loader(screen: Screen, options: ProposeOptions) -> "Callable[[ProposerMetrics], BlockMaker]":
    """Check every setting that loading needs; returns what loads the proposers. Raises ConfigError."""
    asked = options.engine_config(capacity=options.capacity or 1)
    Budget.parse(options.memory_budget or "1%")

    def load(metrics: "ProposerMetrics") -> "BlockMaker":
        from kakeya.engine.backends import chosen_backend
        from kakeya.proposers.blocks import BlockMaker
        from kakeya.proposers.desk import desk_config, open_desk

        config = desk_config(chosen_backend(asked))
        _fetch(screen, options, config)
        config = replace(config, capacity=_capacity(options, config))
        return BlockMaker(open_desk(config, _verifier(options.model, config)), metrics).start()

    return load


def _fetch(screen: Screen, options: ProposeOptions, config: EngineConfig) -> None:
    """What models are needed, before memory is counted."""
    from kakeya.models.catalogue import resolve

    with FetchBar(screen) as progress:
        small = (choice.path for choice in config.proposers if choice.kind == MODEL)
        for name in filter(None, (options.model, *small)):
            resolve(name, progress, config)


def _capacity(options: ProposeOptions, config: EngineConfig) -> int:
    """How many sessions to make room for. Raises ConfigError when they do not fit."""
    from kakeya.engine.backends import room_for_sessions
    from kakeya.models.catalogue import resolve
    from kakeya.models.checkpoint import open_checkpoint
    from kakeya.proposers.opening import proposer_memory

    def opened(name: str) -> "Checkpoint":
        return open_checkpoint(resolve(name, config=config))

    verifier = opened(options.model) if options.model else None
    weights, slab = proposer_memory(config, verifier, options.model)
    if not slab:
        return options.capacity or _WITHOUT_SLABS
    small = next((opened(choice.path) for choice in config.proposers if choice.kind == MODEL), verifier)
    assert small is not None, "what has slabs is a model, or shares one"
    slots = config.cache.slots
    return fitting_capacity(
        options.capacity,
        Budget.parse(options.memory_budget or DEFAULT_BUDGETS[config.backend]),
        bytes_per_token=slab // slots,
        slots=slots,
        available=room_for_sessions(small, config, options.capacity or MOST_BY_DEFAULT)
        - (weights if small is verifier else 0),
        beside=lambda sessions: 0,
    )


_WITHOUT_SLABS = 4096


def _verifier(model: str, config: EngineConfig) -> "LoadedModel | None":
    if not model:
        return None
    from kakeya.config import NO_PROPOSER
    from kakeya.loading import load_model

    return load_model(model, replace(config, proposer=NO_PROPOSER, capacity=1))


def _banner(maker: "BlockMaker", address: str, callers: str, metrics_url: str | None) -> Iterator[str]:
    import kakeya

    desk = maker.desk
    yield f"kakeya {kakeya.__version__} proposes with {desk.name} on {address}"
    taken = f", {human_bytes(desk.held_bytes)}, taken now" if desk.held_bytes else ""
    yield f"  sessions  {desk.capacity:,} in memory at once{taken}"
    yield f"  guesses   up to {desk.max_ahead} tokens beyond a history"
    verifiers = f"tokenizer {desk.tokenizer_digest[:12]}" if desk.tokenizer_digest else "any tokenizer"
    yield f"  for       verifiers with {verifiers}"
    yield f"  callers   {callers}"
    if metrics_url is not None:
        yield f"  metrics   {metrics_url}"
