"""`kakeya cluster`: sessions on many machines."""

import importlib.util
import shlex
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table

from kakeya.cli.cluster_home import HomeOptions, home
from kakeya.cli.command import ENVIRONMENT_PREFIX, command_of
from kakeya.cli.console import Screen, human_bytes
from kakeya.errors import ConfigError
from kakeya.serving.config import is_loopback

if TYPE_CHECKING:
    from kakeya.cluster.on_ray import RayCluster
    from kakeya.cluster.ray_actors import Group
    from kakeya.wire import cluster_pb2 as pb

_ray = partial(typer.Option, envvar=f"{ENVIRONMENT_PREFIX}_RAY_ADDRESS", rich_help_panel="The cluster")
_group = partial(typer.Option, rich_help_panel="The homes")
Address = Annotated[
    str, _ray("--address", help="Where Ray's head is: HOST:PORT, or auto for this machine's.")
]


def register(app: typer.Typer) -> None:
    verbs = typer.Typer(
        no_args_is_help=True,
        help="Serve sessions on many machines behind one address. Ray must run on them: `ray start`.",
    )
    verbs.command(
        "up",
        help="Start homes on the machines of a Ray cluster, and those again that were there before. What "
        "follows -- goes to every home: any flag of `kakeya serve`.",
        context_settings={"allow_extra_args": True},
    )(command_of(UpOptions, up))
    verbs.command("status", help="Show the homes, and how they fare.")(command_of(StatusOptions, status))
    verbs.command(
        "drain", help="Move all sessions of a node elsewhere, unseen by clients, and end its homes."
    )(command_of(DrainOptions, drain))
    verbs.command(
        "undrain",
        help="Give a node's homes new sessions again, where a drain was killed and could not say so.",
    )(command_of(UndrainOptions, undrain))
    verbs.command(
        "down", help="End all homes. Their sessions stay stored, and come back with the next `up`."
    )(command_of(StatusOptions, down))
    verbs.command(
        "home",
        help="Run one home by hand, without Ray. Every flag has a KAKEYA_ environment twin; the flag wins.",
        context_settings={"auto_envvar_prefix": ENVIRONMENT_PREFIX},
    )(command_of(HomeOptions, home))
    app.add_typer(verbs, name="cluster")


@dataclass(frozen=True)
class UpOptions:
    """Which homes to start."""

    shared: Annotated[
        Path,
        _group(help="Directory that every machine reaches under this path. Sessions are stored in it."),
    ]
    model: Annotated[str, _group(help="The homes' model: a name, a path or a hub id.")]
    address: Address = "auto"
    homes: Annotated[int, _group(help="How many homes.")] = 1
    most_homes: Annotated[
        int, _group(help="Let them grow up to so many by free slabs and waiting requests, and shrink again.")
    ] = 0
    group: Annotated[
        str, _group(help="What they are called: NAME-1, NAME-2… Another model needs another group.")
    ] = "home"
    cpus: Annotated[float, _group(help="CPUs that Ray gives to each, and its threads.")] = 1.0
    gpus: Annotated[float, _group(help="GPUs that Ray gives to each.")] = 0.0
    resource: Annotated[
        list[str] | None,
        _group(help="Only on nodes that were started with this resource: NAME or NAME=AMOUNT. Repeatable."),
    ] = None
    proposers: Annotated[
        int, _group(help="Proposers that guess tokens for these homes, one CPU each, on any node.")
    ] = 0
    proposing: Annotated[
        str, _group(help="Flags of `kakeya propose` for them, such as '--proposer model:PATH'.")
    ] = ""
    host: Annotated[
        str, _group(help="Where homes listen; the node's own address when left out. Plain text.")
    ] = ""
    insecure: Annotated[
        bool, _group("--insecure", help="Homes listen beyond their machine: the network is trusted.")
    ] = False
    timeout_s: Annotated[float, _group(help="Seconds in which all must serve.")] = 600.0


@dataclass(frozen=True)
class StatusOptions:
    """Which cluster."""

    address: Address = "auto"


@dataclass(frozen=True)
class DrainOptions:
    """What to empty."""

    node: Annotated[str, typer.Argument(help="The node, as `kakeya cluster status` shows it.")]
    address: Address = "auto"
    patience_s: Annotated[float, typer.Option(help="Seconds that working sessions get to end.")] = 600.0


@dataclass(frozen=True)
class UndrainOptions:
    """What to use again."""

    node: Annotated[str, typer.Argument(help="The node, as `kakeya cluster status` shows it.")]
    address: Address = "auto"


def up(context: typer.Context, options: UpOptions) -> None:
    from kakeya.cluster.members import make_secret

    if not options.insecure and not is_loopback(options.host):
        raise ConfigError(
            "homes talk in plain text at their nodes' addresses: accept that with --insecure, on a network "
            "that you trust, or keep them on one machine with --host 127.0.0.1"
        )
    resources = dict(map(_resource, options.resource or ()))
    secret = make_secret(options.shared.expanduser().resolve() / "secret")
    screen = Screen()
    with _connected(options.address) as cluster:
        homes = cluster.up(_group_of(options, context.args, resources), secret, options.timeout_s)
        _show(screen, homes)
    screen.line(f"{len(homes)} homes serve. Reach them with: kakeya serve --cluster {options.address}")


def status(context: typer.Context, options: StatusOptions) -> None:
    with _connected(options.address) as cluster:
        _show(Screen(), list(cluster.view().homes))


def drain(context: typer.Context, options: DrainOptions) -> None:
    screen = Screen()
    with _connected(options.address) as cluster:
        drained, moved = cluster.drain(options.node, options.patience_s)
    screen.line(
        f"{drained.sessions:,} sessions moved in {drained.seconds:.1f} s: {human_bytes(drained.bytes)}. "
        f"Node {options.node} has no home any more."
    )
    for name in moved:
        screen.line(f"{name} keeps responses or conversations, and goes on at another node.")


def undrain(context: typer.Context, options: UndrainOptions) -> None:
    with _connected(options.address) as cluster:
        names = cluster.undrain(options.node)
    Screen().line(
        f"Homes that get new sessions again: {', '.join(names) or 'none, since none was draining'}."
    )


def down(context: typer.Context, options: StatusOptions) -> None:
    with _connected(options.address) as cluster:
        ended = cluster.down()
    Screen().line(f"{ended} homes have ended. Their sessions are stored.")


def _group_of(options: UpOptions, extra: list[str], resources: dict[str, float]) -> "Group":
    from kakeya.cluster.ray_actors import Group

    shared = options.shared.expanduser().resolve()
    arguments = ["--shared", str(shared), "--model", options.model, *extra]
    if "--threads" not in extra and options.cpus >= 1:
        arguments += ["--threads", str(int(options.cpus))]
    arguments += ["--insecure"] if options.insecure else []
    return Group(
        options.group,
        options.homes,
        tuple(arguments),
        options.cpus,
        options.gpus,
        resources,
        options.host,
        options.proposers,
        tuple(shlex.split(options.proposing)),
        options.most_homes,
    )


def _resource(written: str) -> tuple[str, float]:
    name, equals, amount = written.partition("=")
    try:
        return name, float(amount) if equals else 0.001
    except ValueError:
        raise ConfigError(f"--resource is NAME or NAME=AMOUNT, got {written!r}") from None


def _connected(address: str) -> "AbstractContextManager[RayCluster]":
    """The cluster on a Ray. Raises ConfigError without the package."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("the package ray is not installed: pip install 'kakeya[cluster]'")
    from kakeya.cluster.on_ray import connected

    return connected(address)


def _show(screen: Screen, homes: "list[pb.Home]") -> None:
    columns = (
        "home",
        "node",
        "model",
        "epoch",
        "slabs",
        "free",
        "sessions",
        "running",
        "waiting",
        "is",
        "at",
    )
    table = Table(box=SIMPLE)
    for column in columns:
        table.add_column(
            column, justify="left" if column in ("home", "node", "model", "is", "at") else "right"
        )
    for each in homes:
        condition = "silent" if each.silent else "draining" if each.draining else "serving"
        figures = (each.epoch, each.slabs, each.free_slabs, each.sessions, each.running, each.waiting)
        table.add_row(
            each.name, each.node, each.model, *(f"{value:,}" for value in figures), condition, each.address
        )
    screen.out.print(table)
