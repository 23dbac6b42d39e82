"""Who is in the cluster: every home as it was at its last sign of life.

Plain bookkeeping, in one place. It stores nothing: when it begins anew, the next signs of life fill it again.
"""

import secrets
import time
from collections.abc import Callable

from kakeya.wire import cluster_pb2 as pb

# After so long without a sign of life a home gets no new sessions.
SILENT_S = 3.0
SILENT_PROPOSER_S = 10.0


class Registry:
    """Homes by name. The one with the highest epoch is the home; an earlier one is not listened to."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._name = secrets.token_hex(8)
        self._homes: dict[str, pb.Home] = {}
        self._heard: dict[str, float] = {}
        self._draining: set[str] = set()
        self._proposers: dict[tuple[str, str], float] = {}

    def report(self, home: pb.Home) -> pb.View:
        """A sign of life of a home; who is in the cluster."""
        known = self._homes.get(home.name)
        if known is None or home.epoch >= known.epoch:
            self._homes[home.name] = home
            self._heard[home.name] = self._clock()
        return self.view()

    def view(self) -> pb.View:
        """Everybody, those included that may come back."""
        homes = [self._shown(home) for _, home in sorted(self._homes.items())]
        return pb.View(homes=homes, list=self._name)

    def drain(self, name: str, *, draining: bool = True) -> None:
        """Whether a home is to be emptied. It gets no new sessions then."""
        (self._draining.add if draining else self._draining.discard)(name)

    def remove(self, name: str) -> None:
        """A home is no more, and will not come back."""
        self._homes.pop(name, None)
        self._heard.pop(name, None)
        self._draining.discard(name)

    def propose(self, group: str, address: str) -> None:
        """A sign of life of a proposer, which guesses for the homes of a group."""
        self._proposers[group, address] = self._clock()

    def proposers(self, group: str) -> list[str]:
        """The addresses of those that were heard of lately."""
        heard = self._proposers.items()
        return sorted(
            address
            for (name, address), at in heard
            if name == group and self._clock() - at <= SILENT_PROPOSER_S
        )

    def _shown(self, home: pb.Home) -> pb.Home:
        shown = pb.Home()
        shown.CopyFrom(home)
        shown.draining = home.name in self._draining
        shown.silent = self._clock() - self._heard[home.name] > SILENT_S
        return shown
