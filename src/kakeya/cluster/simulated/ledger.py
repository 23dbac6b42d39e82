"""What must hold in a simulated cluster: a session is never lost, and never has two homes."""

from collections import Counter
from collections.abc import Iterable

from kakeya.cluster.simulated.home import Home, Talk

_MOST_NAMED = 20


class Ledger:
    """Counts what broke, and names the first cases."""

    def __init__(self) -> None:
        self.checks = self.audits = self.lost = self.doubled = self.overfull = 0
        self.named: list[str] = []

    def check(self, talk: Talk, now: float) -> None:
        """One session, after something happened to it. Of one that was closed nothing is asked."""
        if talk.closed:
            return
        self.checks += 1
        answering = sum(home.answers(talk) for home in talk.holders)
        if answering > 1:
            self.doubled += 1
            self._name(f"{talk.id} has {answering} homes at {now:.3f} s")
        elif not talk.holders or (not answering and talk.transfer is None):
            self.lost += 1
            self._name(f"{talk.id} has no home at {now:.3f} s")

    def audit(self, homes: Iterable[Home], talks: Iterable[Talk], now: float) -> None:
        """All sessions, from what the directories hold and nothing else."""
        self.audits += 1
        answering: Counter[int] = Counter()
        for home in homes:
            if len(home.sessions) > home.places:
                self.overfull += 1
                self._name(f"{home.name} has {len(home.sessions)} sessions in the audit at {now:.3f} s")
            answering.update(number for number in home.sessions if number not in home.leaving)
        for talk in talks:
            found = answering.pop(talk.number, 0)
            if found > 1:
                self.doubled += 1
                self._name(f"{talk.id} has {found} homes in the audit at {now:.3f} s")
            elif not found and talk.transfer is None:
                self.lost += 1
                self._name(f"{talk.id} is in no directory in the audit at {now:.3f} s")
        for number in answering:
            self.doubled += 1
            self._name(f"s{number:08} was closed and is stored in the audit at {now:.3f} s")

    def _name(self, what: str) -> None:
        if len(self.named) < _MOST_NAMED:
            self.named.append(what)
