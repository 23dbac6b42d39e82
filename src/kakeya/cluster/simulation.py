"""A cluster in virtual time: turns, new sessions, drains, deaths and scaling, planned by the real planner.

Events happen one after another, and chance is seeded: the same scenario and costs have the same outcome, but
for the wall time that the planner takes, which is measured. After each event that touches a session, the
ledger checks that it has one home.
"""

from collections.abc import Callable

from kakeya.cluster.simulated.costs import Costs
from kakeya.cluster.simulated.deaths import Deaths
from kakeya.cluster.simulated.moves import Moves
from kakeya.cluster.simulated.scenario import Outcome, Scenario
from kakeya.cluster.simulated.turns import Turns
from kakeya.cluster.simulated.upkeep import Upkeep
from kakeya.cluster.simulated.world import World

_AUDITS = 4


class Simulation:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, costs: Costs) -> None:
        self.world = world = World(scenario, costs)
        self.turns = Turns(world)
        self.upkeep = Upkeep(world, self.turns.mean_queue_s)
        self.moves = Moves(world, self.turns.go_on, self.upkeep.spent)
        self.upkeep.moves = self.moves
        self.deaths = Deaths(world, self.moves, self.turns, self.upkeep.opened)

    def run(self, progress: Callable[[float], None] = lambda done: None) -> Outcome:
        """Play it to its end, once; `progress` hears the share that is done."""
        world, scenario = self.world, self.world.scenario
        for _ in range(scenario.nodes):
            world.new_home()
        self.upkeep.fill()
        for begin in (self.turns.come, self.upkeep.session_comes, self.upkeep.session_goes, self.deaths.come):
            begin()
        world.clock.after(scenario.drain_every_s, self.upkeep.drain_next)
        world.clock.after(scenario.rebalance_every_s, self.upkeep.rebalance)
        world.clock.after(scenario.scale_every_s, self.upkeep.scale)
        self._look(progress)
        for part in range(1, _AUDITS + 1):
            world.clock.run(scenario.seconds * part / _AUDITS)
            world.audit()
        return self._told()

    def _look(self, progress: Callable[[float], None]) -> None:
        self.world.look()
        progress(self.world.clock.now / self.world.scenario.seconds)
        self.world.clock.after(self.world.scenario.look_every_s, self._look, progress)

    def _told(self) -> Outcome:
        """The outcome, with what moves and ledger have counted."""
        world, outcome, ledger, moves = self.world, self.world.outcome, self.world.ledger, self.moves
        outcome.moves, outcome.broken_moves, outcome.moved_bytes = moves.done, moves.broken, moves.bytes
        outcome.pauses_s = moves.pauses
        outcome.checks, outcome.audits = ledger.checks, ledger.audits
        outcome.lost, outcome.doubled, outcome.overfull = ledger.lost, ledger.doubled, ledger.overfull
        outcome.violations = tuple(ledger.named)
        busy = sum(home.busy_until(world.clock.now) for home in (*world.homes.values(), *world.gone))
        nodes = sum(look.homes for look in outcome.looks) / len(outcome.looks)
        outcome.busy_share = busy / (nodes * world.scenario.seconds)
        return outcome
