"""Turns of simulated sessions: they wake, read, answer, and wait where they must."""

from kakeya.cluster.simulated.home import Home, Talk
from kakeya.cluster.simulated.world import World


class Turns:
    """Each session is asked again and again, at random. Who asks waits for the answer."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._queued = (0.0, 0)

    def come(self) -> None:
        """The next turn, of any session."""
        world = self._world
        if world.talks:
            talk = world.talks[world.chance.randrange(len(world.talks))]
            if talk.asked is None:
                talk.asked = world.clock.now
                self.go_on(talk)
        world.clock.after(world.wait(world.scenario.turn_every_s / max(1, len(world.talks))), self.come)

    def go_on(self, talk: Talk) -> None:
        """Answer what a session was asked, if anything, as soon as its home can."""
        if talk.asked is None or talk.working:
            return
        home = talk.home
        if not home.up:
            talk.met = "death"
            home.knocking[talk.number] = talk
        elif talk.transfer is not None:
            talk.met = talk.met or "move"  # whoever ends the move calls again
        elif len(home.working) >= home.slabs:
            home.queue.append(talk)
        else:
            self._begin(talk, home)

    def interrupt(self, home: Home) -> None:
        """A node died: what it computed is asked for again, from now on."""
        now = self._world.clock.now
        for talk in home.working.values():
            talk.working, talk.asked = False, now
        for talk in (*home.working.values(), *home.queue):
            talk.met = "death"
            home.knocking[talk.number] = talk
        self._rest(home)
        home.working.clear()
        home.queue.clear()

    def mean_queue_s(self) -> float:
        """How long turns have waited for a slab since this was asked last."""
        (seconds, turns), self._queued = self._queued, (0.0, 0)
        return seconds / turns if turns else 0.0

    def _begin(self, talk: Talk, home: Home) -> None:
        """A turn keeps the pace of the moment in which it begins."""
        world, scenario, costs = self._world, self._world.scenario, self._world.costs
        wake = self._wake(talk, home)
        if not home.working:
            home.busy_since = world.clock.now
        talk.working, home.working[talk.number] = True, talk
        working = len(home.working)
        prompt, answer = 1 + world.tokens(scenario.prompt_tokens), 1 + world.tokens(scenario.answer_tokens)
        first = wake + (talk.redo + prompt) * working / costs.prompt_tokens_per_s
        talk.redo = 0
        self._note(talk, first)
        rest = answer * working / costs.tokens_per_s(working)
        world.clock.after(first + rest, self._end, talk, home, home.epoch, prompt, answer)

    def _wake(self, talk: Talk, home: Home) -> float:
        world, place = self._world, home.wake(talk)
        world.outcome.wakes[place] += 1
        if place == "slab":
            return 0.0
        spread = world.costs.host_wake if place == "host" else world.costs.disk_wake
        return spread.draw(world.chance)

    def _note(self, talk: Talk, first: float) -> None:
        """Turns that met a move or a death tell how long their client waited for the answer's beginning."""
        assert talk.asked is not None
        outcome, waited = self._world.outcome, self._world.clock.now - talk.asked
        if talk.met == "death":
            outcome.waits_after_death_s.append(waited + first)
        elif talk.met == "move":
            outcome.waits_for_move_s.append(waited + first)
        else:
            seconds, turns = self._queued
            self._queued = (seconds + waited, turns + 1)
            if waited > 0:
                outcome.queued_s.append(waited)
        talk.met = ""

    def _end(self, talk: Talk, home: Home, epoch: int, prompt: int, answer: int) -> None:
        if home.epoch != epoch or not home.up:
            self._end_behind_the_fence(talk, home, epoch, prompt + answer)
            return
        self._world.outcome.turns += 1
        self._world.outcome.tokens += answer
        talk.tokens += prompt + answer
        talk.working, talk.asked = False, None
        del home.working[talk.number]
        self._world.check(talk)
        while home.queue and len(home.working) < home.slabs:
            self._begin(home.queue.popleft(), home)
        if not home.working:
            self._rest(home)

    def _end_behind_the_fence(self, talk: Talk, home: Home, epoch: int, tokens: int) -> None:
        """A node that died says nothing. One that is cut off stores until its successor opens."""
        if epoch not in home.cut_off:
            return
        if home.epoch != epoch:
            self._world.outcome.fenced += 1
        elif home.answers(talk):
            self._world.outcome.stored_by_cut_off += 1
            talk.tokens += tokens

    def _rest(self, home: Home) -> None:
        if home.busy_since >= 0:
            home.busy_s += self._world.clock.now - home.busy_since
        home.busy_since = -1.0
