"""Sessions on their way between simulated homes, as ADR 41 has it, with homes that die in between."""

from collections.abc import Callable
from dataclasses import dataclass

from kakeya.cluster.simulated.home import Home, Talk
from kakeya.cluster.simulated.world import World


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A session that leaves. The epochs of both homes tell whether one of them has died since."""

    talk: Talk
    source: Home
    target: Home
    move: int
    source_epoch: int
    target_epoch: int
    began: float
    bytes: int


class Moves:
    """Carries out what plans say, a few sessions of each home at a time.

    `freed` is called with a session that can be used again, `spent` with a home that has no more to send.
    """

    def __init__(self, world: World, freed: Callable[[Talk], None], spent: Callable[[Home], None]) -> None:
        self._world, self._clock, self._costs = world, world.clock, world.costs
        self._at_once = world.scenario.moves_at_once
        self._freed, self._spent = freed, spent
        self.pauses: list[float] = []
        self.done = self.broken = self.bytes = 0

    def plan(self, talk: Talk, target: Home) -> None:
        """Have a session moved. Its place is taken from now on, so that no other plan counts on it."""
        target.expected += 1
        talk.home.to_move.append((talk, target))

    def cancel(self, source: Home) -> None:
        """Forget the moves of a home that have not begun."""
        while source.to_move:
            self._drop(source)

    def _drop(self, source: Home) -> None:
        _, target = source.to_move.popleft()
        target.expected -= 1

    def pump(self, source: Home) -> None:
        """Begin as many of a home's moves as may travel at once."""
        while source.up and source.to_move and source.sending < self._at_once and not source.blocked:
            talk, target = source.to_move[0]
            if not (talk.home is source and talk.rests and target.accepts(talk)):
                self._drop(source)  # the session works, or the target is gone: a later plan has it
            elif target.receiving >= self._at_once:
                source.blocked = True
                target.senders.append(source)
            else:
                source.to_move.popleft()
                self._begin(talk, target)
        if not source.to_move and not source.sending:
            self._spent(source)

    def _begin(self, talk: Talk, target: Home) -> None:
        source, size = talk.home, self._costs.bytes(talk.tokens)
        talk.moves += 1
        source.leaving[talk.number] = talk.moves
        source.awake.pop(talk.number, None)
        source.host.pop(talk.number, None)
        epochs = source.epoch, target.epoch
        talk.transfer = Transfer(talk, source, target, talk.moves, *epochs, self._clock.now, size)
        source.sending += 1
        target.receiving += 1
        # Each of those that travel at once has its part of the link.
        seconds = (
            self._costs.move.draw(self._world.chance) + size * self._at_once / self._costs.link_bytes_per_s
        )
        self._clock.after(seconds, self._arrive, talk.transfer)

    def _arrive(self, transfer: Transfer) -> None:
        source, target = transfer.source, transfer.target
        source.sending -= 1
        target.receiving -= 1
        if self._same(source, transfer.source_epoch) and self._same(target, transfer.target_epoch):
            self._take(transfer)
        else:
            self.broken += 1
            self.settle(transfer)
        while target.senders and target.receiving < self._at_once:
            sender = target.senders.popleft()
            sender.blocked = False
            self.pump(sender)
        self.pump(source)

    def _take(self, transfer: Transfer) -> None:
        """The target has stored it and answers for it; the source does not know yet."""
        talk, target = transfer.talk, transfer.target
        target.expected -= 1
        target.store(talk)
        target.taken.add((talk.number, transfer.move))
        talk.home, talk.transfer = target, None
        self.done += 1
        self.bytes += transfer.bytes
        transfer.source.drained_bytes += transfer.bytes
        transfer.source.drained_sessions += 1
        self.pauses.append(self._clock.now - transfer.began)
        self._world.check(talk)
        self._clock.after(self._costs.call_s, self._told, transfer)
        self._freed(talk)

    def _told(self, transfer: Transfer) -> None:
        if self._same(transfer.source, transfer.source_epoch):
            transfer.source.forget(transfer.talk)
            self._world.check(transfer.talk)
        else:
            self.settle(transfer)

    def settle(self, transfer: Transfer) -> None:
        """End the doubt about a move that a death broke; waits until both homes can be asked."""
        talk, source, target = transfer.talk, transfer.source, transfer.target
        if not source.up:
            source.unsettled.append(transfer)
        elif not target.up:
            target.unsettled.append(transfer)
        elif target.was_taken(talk, transfer.move):
            source.forget(talk)
            self._world.check(talk)
        else:
            del source.leaving[talk.number]
            target.expected -= 1
            talk.transfer = None
            self.pauses.append(self._clock.now - transfer.began)
            self._world.check(talk)
            self._freed(talk)

    @staticmethod
    def _same(home: Home, epoch: int) -> bool:
        return home.up and home.epoch == epoch
