"""The same chats to several servers, in turns: their tokens a second, and what they answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kakeya.bench.arrivals import Arrival, Outcome, play
from kakeya.bench.processes import Server
from kakeya.bench.texts_to_draft import Task, tasks
from kakeya.errors import RemoteError

PATIENCE_S = 600.0


@dataclass(frozen=True)
class Chats:
    """So many chats of a kind at once, at one temperature."""

    kind: str
    temperature: float
    sessions: int
    max_tokens: int

    def arrivals(self, turn: int = 0) -> list[Arrival]:
        """What is asked in this turn: each turn asks what comes next, as one text alone says little of its
        kind."""
        first = turn * self.sessions
        asked = tasks(self.kind, range(first, first + self.sessions))
        return [self._arrival(task, seed) for seed, task in enumerate(asked, start=first)]

    def _arrival(self, task: Task, seed: int) -> Arrival:
        fields = {"temperature": self.temperature, "seed": seed, **task.fields}
        return Arrival(0.0, task.messages, self.max_tokens, fields)

    def label(self) -> str:
        plural = "session" if self.sessions == 1 else "sessions"
        return f"{self.kind}, temperature {self.temperature:g}, {self.sessions} {plural}"


@dataclass(frozen=True)
class Played:
    """Of each server by its name: tokens a second of each repetition, and the outcomes of all of them."""

    speeds: Mapping[str, list[float]]
    outcomes: Mapping[str, list[Outcome]]

    def same(self, one: str, other: str) -> float:
        """The share of answers that two servers gave alike."""
        pairs = zip(self.outcomes[one], self.outcomes[other], strict=True)
        return sum(a.text == b.text for a, b in pairs) / len(self.outcomes[one])

    def accepted(self, name: str) -> int:
        return sum(outcome.accepted_tokens for outcome in self.outcomes[name])

    def proposed(self, name: str) -> int:
        return self.accepted(name) + sum(outcome.rejected_tokens for outcome in self.outcomes[name])

    def tokens(self, name: str) -> int:
        return sum(outcome.tokens for outcome in self.outcomes[name])

    def ended(self, name: str) -> list[Outcome]:
        """The answers that ended by themselves."""
        return [outcome for outcome in self.outcomes[name] if outcome.finish_reason == "stop"]


async def contest(servers: Mapping[str, Server], chats: Chats, repeats: int) -> Played:
    """Let the servers answer in turns; every other repetition goes backwards, and one before is uncounted.

    Raises RemoteError when a server fails to answer.
    """
    played = Played(*({name: [] for name in servers} for _ in range(2)))
    for turn in range(1 + repeats):
        arrivals = chats.arrivals(turn)
        for name in list(servers)[:: 1 if turn % 2 else -1]:
            server = servers[name]
            outcomes = await play(server.http_address, server.info.model_id, arrivals, PATIENCE_S)
            speed = tokens_a_second(outcomes)
            if turn:
                played.speeds[name].append(speed)
                played.outcomes[name].extend(outcomes)
    return played


def tokens_a_second(outcomes: Sequence[Outcome]) -> float:
    """What so many sessions make together where the next chat follows each that ends.

    So what drafts gain counts in each session: until the last answer ends, they would help the slowest alone.
    """
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    if failures:
        raise RemoteError(f"a chat was not answered: {failures[0]}")
    return len(outcomes) * of_each(outcomes)


def of_each(outcomes: Sequence[Outcome]) -> float:
    """Tokens a second of one of these answers: those of all, but for the first ones, over the time of all."""
    answers = [each for each in outcomes if each.pieces_s]
    seconds = sum(each.ended_s - each.pieces_s[0] for each in answers)
    return sum(each.tokens - 1 for each in answers) / seconds if seconds > 0 else 0.0
