"""What keeps a simulated cluster in order, by the real planner: placing, drains, rebalancing, scaling."""

from collections.abc import Callable, Iterable

from kakeya.cluster.placement import choose_home, drain, node_to_remove, place_all, rebalance, wanted_replicas
from kakeya.cluster.replicas import Move, Scaling, Session
from kakeya.cluster.simulated.home import MODEL, Home, Talk
from kakeya.cluster.simulated.moves import Moves
from kakeya.cluster.simulated.world import World
from kakeya.errors import NoFreeSlab, Unavailable

# A drain looks again so often for sessions that were working.
_AGAIN_S = 1.0
# So much fewer nodes must be wanted before one is taken away: else it comes back at once.
_SLACK = 0.002


class Upkeep:
    """`moves` is set by the simulation: it tells `spent` of homes that have nothing left to send."""

    moves: Moves

    def __init__(self, world: World, queue_s: Callable[[], float]) -> None:
        self._world, self._queue_s = world, queue_s
        self._scaling = Scaling(most=2 * world.scenario.nodes)
        self._coming = 0
        self._node = 0

    # Sessions come and go.

    def fill(self) -> None:
        """All sessions get their homes in one plan."""
        world = self._world
        talks = {each.id: each for each in (world.new_talk() for _ in range(world.scenario.sessions))}
        waiting = [self._asked_for(each) for each in talks.values()]
        plan = world.planned("place_all", lambda: place_all(waiting, world.replicas()))
        world.count_unplaced(plan)
        for move in plan.moves:
            self._settle(talks[move.session], world.homes[move.target])

    def session_comes(self) -> None:
        world, scenario = self._world, self._world.scenario
        if world.clock.now > 0:
            self._place(world.new_talk())
        if scenario.surge and world.clock.now < scenario.seconds / 2:
            mean_s = scenario.lifetime_s / scenario.sessions / scenario.surge
            world.clock.after(world.wait(mean_s), self.session_comes)

    def _place(self, talk: Talk) -> None:
        world, replicas = self._world, self._world.replicas()
        try:
            chosen = world.planned("choose_home", lambda: choose_home(self._asked_for(talk), replicas))
        except (NoFreeSlab, Unavailable):
            world.outcome.refused += 1
            world.outcome.refused_with_room += world.room() > 0
            return
        self._settle(talk, world.homes[chosen.name])
        world.check(talk)

    def _asked_for(self, talk: Talk) -> Session:
        return Session(talk.id, MODEL, self._world.costs.bytes(talk.tokens))

    def _settle(self, talk: Talk, home: Home) -> None:
        talk.home = home
        home.store(talk)
        self._world.talks.append(talk)
        self._world.outcome.placed += 1

    def session_goes(self) -> None:
        """Any session is closed, if it rests."""
        world, talks = self._world, self._world.talks
        if world.clock.now > 0 and talks:
            place = world.chance.randrange(len(talks))
            talk = talks[place]
            if talk.rests and talk.home.up:
                talks[place] = talks[-1]
                talks.pop()
                talk.closed = True
                talk.home.forget(talk)
                world.outcome.closed += 1
        world.clock.after(world.wait(world.scenario.lifetime_s / world.scenario.sessions), self.session_goes)

    # Homes are emptied.

    def drain_next(self) -> None:
        """The next node in turn is emptied, starts anew and comes back, as when all get a new version."""
        homes = [each for each in self._world.homes.values() if each.up and not each.draining]
        self._node = (self._node + 1) % max(1, len(homes))
        if homes and self._has_room_without(homes[self._node]):
            self.begin_drain(homes[self._node], returns=True)
        else:
            self._world.outcome.drains_put_off += 1
        self._world.clock.after(self._world.scenario.drain_every_s, self.drain_next)

    def _has_room_without(self, home: Home) -> bool:
        """Whether the others could take what it holds, beside what is being moved already."""
        leaving = sum(each.held for each in self._world.homes.values() if each.draining)
        return self._world.room() - home.replica().room >= leaving + home.held

    def begin_drain(self, home: Home, *, returns: bool) -> None:
        home.draining, home.returns, home.drain_began = True, returns, self._world.clock.now
        home.drained_bytes = home.drained_sessions = 0
        self.moves.cancel(home)
        self._plan_drain(home)

    def opened(self, home: Home) -> None:
        """A home is back after a death. If it was being emptied, that goes on."""
        if home.draining:
            self._plan_drain(home)

    def _plan_drain(self, home: Home) -> None:
        home.planned = False
        if home.closed or not home.up or home.to_move:
            return
        world = self._world
        mine, replicas = list(world.sessions([home])), world.replicas()
        plan = world.planned("drain", lambda: drain(home.node, replicas, mine))
        world.count_unplaced(plan)
        self._send(plan.moves)
        self.spent(home)

    def spent(self, home: Home) -> None:
        """A home has nothing left to send. One that drains is done, or looks again in a moment."""
        if not home.draining or home.closed or home.to_move or home.sending:
            return
        if home.empty:
            self._close(home)
        elif not home.planned:
            home.planned = True
            self._world.clock.after(_AGAIN_S, self._plan_drain, home)

    def _close(self, home: Home) -> None:
        world = self._world
        world.outcome.drain_s.append(world.clock.now - home.drain_began)
        world.outcome.drain_bytes.append(home.drained_bytes)
        world.outcome.drain_sessions.append(home.drained_sessions)
        world.close_home(home)
        if home.returns:
            self._order()

    def _order(self) -> None:
        """A node starts, and then a home with an empty directory on it."""
        self._coming += 1
        seconds = self._world.costs.node_start_s + self._world.costs.restart.draw(self._world.chance)
        self._world.clock.after(seconds, self._arrive)

    def _arrive(self) -> None:
        self._coming -= 1
        self._world.new_home()

    # Load is spread, and nodes follow it.

    def rebalance(self) -> None:
        world = self._world
        homes = [each for each in world.homes.values() if each.up and not each.draining]
        sessions, replicas = list(world.sessions(homes)), world.replicas()
        moves = world.planned("rebalance", lambda: rebalance(replicas, sessions))
        world.outcome.rebalanced += len(moves)
        self._send(moves)
        world.clock.after(world.scenario.rebalance_every_s, self.rebalance)

    def _send(self, moves: Iterable[Move]) -> None:
        world = self._world
        sources = {}
        for move in moves:
            source = world.homes[move.source]
            talk = source.sessions[int(move.session[1:])]
            self.moves.plan(talk, world.homes[move.target])
            sources[source.name] = source
        for source in sources.values():
            self.moves.pump(source)

    def scale(self) -> None:
        """As many homes as the planner wants. Those that are down or on their way count."""
        world = self._world
        group = [each for each in world.homes.values() if not each.draining]
        replicas = [each.replica_if_up() for each in group]
        queue_s = self._queue_s()
        wanted = world.planned("wanted_replicas", lambda: wanted_replicas(replicas, queue_s, self._scaling))
        have = len(group) + self._coming
        for _ in range(wanted - have):
            world.outcome.nodes_added += 1
            self._order()
        if wanted < have * (1 - _SLACK):
            self._remove_one()
        world.clock.after(world.scenario.scale_every_s, self.scale)

    def _remove_one(self) -> None:
        world = self._world
        replicas, sessions = world.replicas(), list(world.sessions(world.homes.values()))
        spared = [each.node for each in world.homes.values() if not each.up]
        node = world.planned("node_to_remove", lambda: node_to_remove(replicas, sessions, spared))
        home = next((each for each in world.homes.values() if each.node == node), None)
        if home is not None:
            world.outcome.nodes_removed += 1
            self.begin_drain(home, returns=False)
