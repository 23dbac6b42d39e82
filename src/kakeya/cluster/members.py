"""What members of a cluster share: a secret, names, and how they call each other."""

import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from kakeya.cluster.replicas import Replica
from kakeya.errors import ConfigError
from kakeya.serving.keys import OWNER_KEY, SECRET_KEY
from kakeya.wire import cluster_pb2 as pb

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
# Between two members a message is a part of a session at most; many calls share a connection.
CHANNEL = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
]

# How a process ends whose state directory another one has taken over.
FENCED_STATUS = 4

Metadata = tuple[tuple[str, str], ...]


def check_name(name: str) -> str:
    """The name of a home. Raises ConfigError for one that cannot stand in an id."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"a home's name must have 1 to 32 small letters, digits and dashes, and begin with no dash, "
            f"got {name!r}"
        )
    return name


def prefix_of(name: str) -> str:
    """What the ids begin with that a home gives to its sessions."""
    return f"{name}."


def home_in(session_id: str) -> str:
    """The home that made a session, a response or a conversation, by its id; empty where it names none."""
    kind_and_name, dot, _ = session_id.partition(".")
    return kind_and_name.rpartition("_")[2] if dot else ""


def read_secret(path: Path) -> str:
    """The cluster's secret. Raises ConfigError for a file that cannot be read or holds too little."""
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the cluster's secret {path} cannot be read: {error}") from error
    if len(secret) < 16 or not secret.isascii() or not secret.isprintable():
        raise ConfigError(f"the cluster's secret {path} must have at least 16 printable ASCII characters")
    return secret


def make_secret(path: Path) -> str:
    """The secret in the file, which is made if it is not there. Nobody else may read it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", opener=_private) as file:  # Path.open takes no opener
            file.write(secrets.token_urlsafe(32))
    return read_secret(path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def credentials(secret: str, owner: str = "") -> Metadata:
    """Metadata, or headers, of a call to a home in the name of an owner."""
    return ((SECRET_KEY, secret), (OWNER_KEY, owner))


def replica_of(home: pb.Home) -> Replica:
    """A home as far as placement is concerned."""
    return Replica(
        name=home.name,
        node=home.node,
        model=home.model,
        slabs=home.slabs,
        free_slabs=home.free_slabs,
        most_sessions=home.most_sessions,
        sessions=home.sessions,
        running=home.running,
        waiting=home.waiting,
        labels=frozenset(home.labels),
        draining=home.draining,
        shape=home.shape,
    )


def newest(homes: Iterable[pb.Home]) -> dict[str, pb.Home]:
    """Each home by its name, as it is under its highest epoch."""
    found: dict[str, pb.Home] = {}
    for home in homes:
        known = found.get(home.name)
        if known is None or home.epoch > known.epoch:
            found[home.name] = home
    return found


class Whereabouts:
    """Where sessions went, of so many that were asked for most recently."""

    def __init__(self, most: int = 2**20) -> None:
        self._most = most
        self._homes: OrderedDict[str, str] = OrderedDict()

    def get(self, session_id: str) -> str:
        """The name of its home; empty where that is not known."""
        return self._homes.get(session_id, "")

    def put(self, session_id: str, home: str) -> None:
        self._homes[session_id] = home
        self._homes.move_to_end(session_id)
        while len(self._homes) > self._most:
            self._homes.popitem(last=False)
