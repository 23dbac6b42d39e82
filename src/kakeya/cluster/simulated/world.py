"""What all parts of a simulation share: homes, sessions, time and chance."""

import time
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import TypeVar

from kakeya.cluster.replicas import Plan, Replica, Session
from kakeya.cluster.simulated.clock import Clock
from kakeya.cluster.simulated.costs import Costs
from kakeya.cluster.simulated.home import MODEL, Home, Talk
from kakeya.cluster.simulated.ledger import Ledger
from kakeya.cluster.simulated.scenario import Look, Outcome, Scenario

T = TypeVar("T")


class World:
    """The cluster as it is now. `gone` has homes that were emptied: what they took in is asked for later."""

    def __init__(self, scenario: Scenario, costs: Costs) -> None:
        self.scenario, self.costs = scenario, costs
        self.chance = Random(scenario.seed)
        self.clock, self.ledger, self.outcome = Clock(), Ledger(), Outcome()
        self.homes: dict[str, Home] = {}
        self.gone: list[Home] = []
        self.talks: list[Talk] = []
        self._unplaced: set[str] = set()
        self._homes_made = self._talks_made = self._nodes_made = 0

    def new_node(self) -> str:
        self._nodes_made += 1
        return f"node-{self._nodes_made:05}"

    def new_home(self) -> Home:
        self._homes_made += 1
        name, scenario = f"home-{self._homes_made:05}", self.scenario
        node = self.new_node()
        self.homes[name] = Home(name, node, scenario.slabs, scenario.places, scenario.host_places)
        return self.homes[name]

    def close_home(self, home: Home) -> None:
        home.closed = True
        del self.homes[home.name]
        self.gone.append(home)

    def new_talk(self) -> Talk:
        self._talks_made += 1
        return Talk(self._talks_made, 1 + self.tokens(self.scenario.history_tokens))

    def tokens(self, mean: float) -> int:
        return int(self.chance.expovariate(1 / mean))

    def wait(self, mean_s: float) -> float:
        return self.chance.expovariate(1 / mean_s)

    def replicas(self) -> list[Replica]:
        return [home.replica() for home in self.homes.values()]

    def room(self) -> int:
        """Places that could be had now."""
        return sum(each.room for each in self.replicas())

    def sessions(self, homes: Iterable[Home]) -> Iterator[Session]:
        """Those of some homes as the planner sees them, without those that are leaving."""
        size = self.costs.bytes
        for home in homes:
            for number, talk in home.sessions.items():
                if number not in home.leaving:
                    yield Session(
                        talk.id, MODEL, size(talk.tokens), home=home.name, working=talk.asked is not None
                    )

    def planned(self, what: str, plan: Callable[[], T]) -> T:
        """Call the planner, and note the wall time that it took, and the processor's."""
        began = time.perf_counter(), time.thread_time()
        try:
            return plan()
        finally:
            took = time.perf_counter() - began[0], time.thread_time() - began[1]
            self.outcome.planner_s[what].append(took)

    def count_unplaced(self, plan: Plan) -> None:
        if plan.unplaced:
            self._unplaced.update(each.session for each in plan.unplaced)
            self.outcome.unplaced = len(self._unplaced)
            self.outcome.unplaced_with_room += min(len(plan.unplaced), self.room_after(plan))

    def room_after(self, plan: Plan) -> int:
        """Places that a plan leaves: each of its moves takes one."""
        return max(0, self.room() - len(plan.moves))

    def check(self, talk: Talk) -> None:
        self.ledger.check(talk, self.clock.now)

    def audit(self) -> None:
        self.ledger.audit([*self.homes.values(), *self.gone], self.talks, self.clock.now)

    def look(self) -> None:
        """Note how things are."""
        homes = self.homes.values()
        fills = [home.held for home in homes if home.up and not home.draining] or [0]
        self.outcome.looks.append(
            Look(
                at_s=self.clock.now,
                sessions=len(self.talks),
                homes=len(homes),
                down=sum(not home.up for home in homes),
                draining=sum(home.draining for home in homes),
                working=sum(len(home.working) for home in homes),
                fullest=max(fills),
                mean=sum(fills) / len(fills),
                emptiest=min(fills),
            )
        )
