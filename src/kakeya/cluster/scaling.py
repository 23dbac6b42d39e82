"""When a group of homes grows and shrinks: by slabs in use, by places taken, and by how long requests wait in
its mean home.

It only decides. Growing is a home more, for which Ray finds a node or lets its autoscaler bring one.
Shrinking is a drain, after a while in which fewer would have done.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kakeya.cluster.members import replica_of
from kakeya.cluster.placement import wanted_replicas
from kakeya.cluster.replicas import Scaling
from kakeya.wire import cluster_pb2 as pb


@dataclass(frozen=True)
class Wish:
    """What should change: so many homes more, or one less."""

    more: int = 0
    fewer: bool = False


class Scaler:
    """Looks at one group again and again. `calm_s` is how long fewer homes must do before one goes."""

    def __init__(
        self, scaling: Scaling, calm_s: float = 300.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scaling, self._calm_s, self._clock = scaling, calm_s, clock
        self._calm_since: float | None = None

    def look(self, homes: Sequence[pb.Home], starting: int = 0) -> Wish:
        """What should change, now that the group has these homes and so many that have not served yet."""
        now, alive = self._clock(), [home for home in homes if not (home.draining or home.silent)]
        queue_s = sum(home.queue_seconds for home in alive) / max(1, len(alive))
        wanted = wanted_replicas(map(replica_of, alive), queue_s, self._scaling)
        if wanted >= len(alive) or starting:
            self._calm_since = None
            return Wish(more=max(0, wanted - len(alive) - starting))
        if self._calm_since is None:
            self._calm_since = now
        if now - self._calm_since < self._calm_s:
            return Wish()
        self._calm_since = None
        return Wish(fewer=True)
