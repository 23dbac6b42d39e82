"""Nodes of a simulated cluster die, and their homes open elsewhere over the same directories."""

from collections import deque
from collections.abc import Callable

from kakeya.cluster.simulated.home import Home
from kakeya.cluster.simulated.moves import Moves
from kakeya.cluster.simulated.turns import Turns
from kakeya.cluster.simulated.world import World


class Deaths:
    """Deaths come at random. A home needs a node: a spare one, or one that has still to start.

    `opened` is called with each home that is back.
    """

    def __init__(self, world: World, moves: Moves, turns: Turns, opened: Callable[[Home], None]) -> None:
        self._world, self._moves, self._turns, self._opened = world, moves, turns, opened
        self._spares = world.scenario.spare_nodes
        self._homeless: deque[Home] = deque()

    def come(self) -> None:
        """One of the nodes dies, if it is up."""
        world = self._world
        if world.clock.now > 0:
            home = world.chance.choice(list(world.homes.values()))
            if home.up:
                self.kill(home)
        world.clock.after(world.wait(world.scenario.node_life_s / max(1, len(world.homes))), self.come)

    def kill(self, home: Home) -> None:
        """Its node dies, or is only thought dead. All its sessions will wake from the directory."""
        world, outcome = self._world, self._world.outcome
        outcome.deaths += 1
        if world.chance.random() < world.scenario.cut_off_share:
            outcome.cut_off += 1
            home.cut_off.add(home.epoch)
        home.up, home.died_at = False, world.clock.now
        for talk in home.awake.values():
            talk.redo = world.chance.randrange(min(talk.tokens, world.costs.slots) + 1)
        home.awake.clear()
        home.host.clear()
        self._moves.cancel(home)
        self._turns.interrupt(home)
        for talk in home.sessions.values():
            world.check(talk)
        world.clock.after(world.costs.detection_s, self._detect, home)

    def _detect(self, home: Home) -> None:
        self._world.clock.after(self._world.costs.node_start_s, self._node_starts)
        if self._spares:
            self._spares -= 1
            self._restart(home)
        else:
            self._world.outcome.waited_for_node += 1
            self._homeless.append(home)

    def _node_starts(self) -> None:
        if self._homeless:
            self._restart(self._homeless.popleft())
        else:
            self._spares += 1

    def _restart(self, home: Home) -> None:
        self._world.clock.after(self._world.costs.restart.draw(self._world.chance), self._open, home)

    def _open(self, home: Home) -> None:
        """The next epoch begins: from now on the former owner can store nothing."""
        world = self._world
        home.epoch += 1
        home.node, home.up = world.new_node(), True
        world.outcome.recovery_s.append(world.clock.now - home.died_at)
        unsettled, home.unsettled = home.unsettled, []
        for transfer in unsettled:
            self._moves.settle(transfer)
        knocking, home.knocking = list(home.knocking.values()), {}
        for talk in knocking:
            self._turns.go_on(talk)
        for talk in home.sessions.values():
            world.check(talk)
        self._opened(home)
