"""`kakeya bench fuzz`: many files that pretend to be exported sessions are imported.

Half of them are changed after they were sealed, as damage on the way does; every one must be refused. The
others are changed and sealed again, as somebody with bad intentions does: such a file is refused, is a
session that works, or is one whose own generate fails, because its keys are absurd.
"""

import json
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakeya.bench.benchmark import EngineBenchmark, Results, Run
from kakeya.bench.report import Gate, at_least, at_most
from kakeya.bench.tables import MS, Chart, Table, figure, listing
from kakeya.errors import InvalidArgument, StateMismatch, StepFailed
from kakeya.types import DoneEvent, TokenRange

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

_fuzz = partial(typer.Option, rich_help_panel="The files")
_LONGEST_S = 5.0
_PROMPT = 40
_RECALL = 32
_CHECKPOINT_EVERY = 5000
Seal = Callable[[bytes], bytes]


@dataclass(frozen=True, kw_only=True)
class FuzzResults(Results):
    """What became of the files."""

    damaged: int = 0
    """Files that were changed after they were sealed."""
    damaged_accepted: int = 0
    forged: int = 0
    """Files that were changed and sealed again."""
    forged_accepted: int = 0
    failed_alone: int = 0
    """Of these, sessions whose model computed no numbers any more; their callers are told."""
    broken: int = 0
    """Of these, sessions that could not go on for another reason."""
    unexpected: tuple[str, ...] = ()
    """Errors that no caller is told of."""
    longest_s: float | None = None
    refusals: dict[str, int] | None = None


@dataclass(frozen=True)
class Fuzz(EngineBenchmark[FuzzResults]):
    """How many files."""

    kind = "fuzz"
    title = "Fuzzing of imported sessions"
    help = "Import damaged and forged files: none that is damaged is accepted, and nothing breaks."
    results = FuzzResults

    window: Annotated[int, _fuzz(help="Most recent tokens kept.")] = 64
    recall: Annotated[
        int, _fuzz(help="Slots for recall of some of the sessions; 0 for sessions without.")
    ] = _RECALL
    files: Annotated[int, _fuzz(help="Files, half of them damaged, half forged.")] = 100_000
    seed: Annotated[int, _fuzz(help="Which changes.")] = 0

    def __post_init__(self) -> None:
        self.require_least(files=2)

    def run(self, run: Run[FuzzResults]) -> FuzzResults:
        from kakeya.runtime import Runtime  # torch takes a second to import

        with Runtime.open(self.model, self.engine_config(capacity=2)) as runtime:
            importing = _Importing(runtime, random.Random(self.seed))
            for number in range(self.files):
                if run.interruption.reason is not None:
                    break
                importing.try_one(forged=number % 2 == 1)
                if number % _CHECKPOINT_EVERY == 0:
                    run.progress(number / self.files, "importing")
                    run.checkpoint(importing.results())
            return importing.results()

    def gates(self, results: FuzzResults) -> list[Gate]:
        tried = results.damaged + results.forged
        nothing = "no file was imported" if not tried else ""

        def judged(count: int) -> float | None:
            return None if nothing else float(count)

        return [
            at_least("files", float(tried), self.files, absent=nothing),
            at_most("damaged files accepted", judged(results.damaged_accepted), 0, absent=nothing),
            at_most("accepted sessions that break", judged(results.broken), 0, absent=nothing),
            at_most("unexpected errors", judged(len(results.unexpected)), 0, absent=nothing),
            at_most("longest import, s", results.longest_s, _LONGEST_S, absent=nothing),
        ]

    @staticmethod
    def show(results: FuzzResults) -> list[Table | Chart]:
        rows = [
            ("damaged files", figure(results.damaged)),
            ("of these accepted", figure(results.damaged_accepted)),
            ("forged files", figure(results.forged)),
            ("of these accepted", figure(results.forged_accepted)),
            ("of these without numbers later", figure(results.failed_alone)),
            ("of these unable to go on", figure(results.broken)),
            ("unexpected errors", figure(len(results.unexpected))),
            ("longest import, ms", figure(results.longest_s, MS, ",.1f")),
        ]
        reasons = sorted((results.refusals or {}).items(), key=lambda each: -each[1])
        return [
            listing("Imports", ("what", "value"), rows, labels=1),
            listing("Why files were refused", ("reason", "files"), [(why, figure(n)) for why, n in reasons]),
        ]


class _Importing:
    """Changes exported sessions in many ways, and counts what becomes of them."""

    def __init__(self, runtime: "Runtime", chance: random.Random) -> None:
        self._runtime, self._chance = runtime, chance
        cache = runtime.config.cache
        self._exported = [_exported(runtime, chance)]
        if cache.recall:
            part = cache.recall // 4
            wanted = [TokenRange(cache.sink, cache.sink + part)]
            remembered = [TokenRange(cache.sink + 2 * part, cache.sink + 3 * part)]
            none: list[TokenRange] = []
            choices = (none, none), (wanted, none), (none, remembered), (wanted, remembered)
            self._exported += [_exported(runtime, chance, *chosen) for chosen in choices]
        self._header, self._contents = self._exported[0]
        self._counts: Counter[str] = Counter()
        self._unexpected: list[str] = []
        self._refusals: dict[str, int] = {}
        self._longest = 0.0

    def try_one(self, *, forged: bool) -> None:
        kind = "forged" if forged else "damaged"
        self._header, self._contents = self._chance.choice(self._exported)
        file = self._forged() if forged else self._damaged()
        self._counts[kind] += 1
        began = time.monotonic()
        try:
            session, _ = self._runtime.import_bytes(file)
        except (StateMismatch, InvalidArgument) as error:
            self._refused(str(error))
            return
        except Exception as error:  # whatever it is, it is what this looks for
            self._unexpected.append(f"{type(error).__name__}: {error}")
            return
        finally:
            self._longest = max(self._longest, time.monotonic() - began)
        self._counts[f"{kind}_accepted"] += 1
        self._go_on(session)

    def results(self) -> FuzzResults:
        counts = self._counts
        return FuzzResults(
            damaged=counts["damaged"],
            damaged_accepted=counts["damaged_accepted"],
            forged=counts["forged"],
            forged_accepted=counts["forged_accepted"],
            failed_alone=counts["failed_alone"],
            broken=counts["broken"],
            unexpected=tuple(self._unexpected[:100]),
            longest_s=self._longest if self._counts["damaged"] else None,
            refusals=dict(self._refusals),
        )

    def _go_on(self, session: str) -> None:
        """An accepted file is a session like any other."""
        try:
            self._runtime.append(session, [3])
            *_, last = self._runtime.generate(session, 2)
            self._counts["broken"] += not isinstance(last, DoneEvent)
        except StepFailed:
            self._counts["failed_alone"] += 1
        except Exception as error:  # whatever it is, it is what this looks for
            self._counts["broken"] += 1
            self._unexpected.append(f"{type(error).__name__} later: {error}")
        self._runtime.close_session(session)

    def _refused(self, message: str) -> None:
        reason = "".join(" " if each.isdigit() else each for each in message)[:60].strip()
        if reason in self._refusals or len(self._refusals) < 40:
            self._refusals[reason] = self._refusals.get(reason, 0) + 1

    def _damaged(self) -> bytes:
        """The file with something changed in it."""
        whole = self._header + self._contents
        while (file := _mutated(self._chance, whole, self._place)) == whole:
            pass
        return file

    def _forged(self) -> bytes:
        """A file whose digest is right."""
        from kakeya.storage.envelope import enveloped

        if self._chance.random() < 0.5:
            contents = _mutated(self._chance, self._contents, self._place)
        else:
            contents = self._other_header()
        return b"".join(map(bytes, enveloped(contents)))

    def _place(self, size: int) -> int:
        """Where something is changed: mostly where much depends on it."""
        return self._chance.randrange(min(self._chance.choice([64, 2048, size]), size))

    def _other_header(self) -> bytes:
        """The contents under a header of which a value or two are others."""
        (size,) = struct.unpack("<Q", self._contents[:8])
        header = json.loads(self._contents[8 : 8 + size])
        for _ in range(self._chance.randint(1, 2)):
            table = self._chance.choice([header, *header.values()])
            if not isinstance(table, dict) or not table:
                continue
            # What a session recalls is most of what the digest cannot hold against a forger.
            name = "recall" if "recall" in table else self._chance.choice(list(table))
            table[name] = _other_value(self._chance, table[name])
        written = json.dumps(header).encode()
        return struct.pack("<Q", len(written)) + written + self._contents[8 + size :]


def _exported(
    runtime: "Runtime",
    chance: random.Random,
    wanted: Sequence[TokenRange] | None = None,
    remembered: Sequence[TokenRange] = (),
) -> tuple[bytes, bytes]:
    """A session's file, its header apart. With recall if it is told what to bring back, be it nothing: its
    window has moved on, and its slots hold what is to be remembered."""
    cache, vocabulary = runtime.config.cache, runtime.model_config.vocab_size
    session = runtime.create_session(eos_token_ids=(), recall_tokens=0 if wanted is None else cache.recall)
    length = _PROMPT if wanted is None else 2 * cache.capacity
    runtime.append(session, [chance.randrange(vocabulary) for _ in range(length)])
    list(runtime.generate(session, 4))
    if remembered:
        runtime.recall(session, remembered, remember=True)
        runtime.append(session, [3])
        list(runtime.generate(session, 4))
    if wanted:
        runtime.recall(session, wanted)
    header, *contents = runtime.export_bytes(session)
    runtime.close_session(session)
    return bytes(header), b"".join(contents)


def _mutated(chance: random.Random, whole: bytes, place: Callable[[int], int]) -> bytes:
    """Bits flipped, bytes set, pieces cut, doubled, moved or blanked."""
    file = bytearray(whole)
    for _ in range(chance.randint(1, 3)):
        at = place(max(1, len(file)))
        size = min(chance.choice([1, 2, 8, 64, 4096]), len(file) - at)
        match chance.randrange(7):
            case 0 if file:
                file[at] ^= 1 << chance.randrange(8)
            case 1 if file:
                file[at] = chance.randrange(256)
            case 2:
                del file[at:]
            case 3:
                file[at:at] = file[at : at + size]
            case 4:
                del file[at : at + size]
            case 5:
                file[at : at + size] = bytes(size)
            case _:
                file[at : at + size] = chance.randbytes(size)
    return bytes(file)


def _other_value(chance: random.Random, value: Any) -> Any:
    """Something else in the place of a value of JSON."""
    odd: tuple[Any, ...] = (None, True, -1, 0, 2**31, 2**63, 2**200, 1e308, "", "x", [], {}, [[]], "9" * 5000)
    if isinstance(value, list) and value and chance.random() < 0.7:
        changed = list(value)
        place = chance.randrange(len(changed))
        changed[place] = _other_value(chance, changed[place])
        return changed
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        return value | {name: _other_value(chance, value[name])}
    if isinstance(value, str) and value.startswith("{") and chance.random() < 0.9:
        return json.dumps(_other_value(chance, json.loads(value)))
    if isinstance(value, str) and value.lstrip("-").isdigit() and len(value) < 99:
        return str(int(value) + chance.choice([-1, 1, 7, 2**20, -(2**40), 2**62]))
    if isinstance(value, int) and chance.random() < 0.7:
        return value + chance.choice([-8, -1, 1, 8, 2**20, 2**50])
    return chance.choice(odd)
