"""Shared prefixes: what one session has computed of a history, others with the same first tokens copy.

As long as a history fits into a slab, position p lies in slot p whatever the session pins, and its keys and
values follow from the tokens up to it alone. So they can be copied, bit for bit. A prefix is found in
granules of some tokens by a chain of digests: each digest covers its granule and all granules before it.

A granule is copied from a live session that still has it, or from a bounded cache, into which it moves when
the last live session that had it is closed, is put to sleep or is about to overwrite it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from operator import itemgetter

from torch import Tensor

from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import KVSlab, SlabPool
from kakeya.errors import InvariantViolation
from kakeya.observer import UNOBSERVED, EngineObserver
from kakeya.types import ShareBeginnings

GRANULE = 16
"""Tokens of a granule where a prompt may be cut anywhere. Elsewhere a granule is a whole prefill block."""

COMMON = ""
"""In the place of an owner: its prefixes are everybody's, and stay in the cache."""


class PrefixCache:
    """Copies of granules in memory of fixed size, which the pool has; the least recently used goes first."""

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self._free = list(range(len(pool.granules)))
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._kept: dict[bytes, int] = {}
        self.evictions = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._places or digest in self._kept

    @property
    def keeps_any(self) -> bool:
        """Whether there are granules that stay."""
        return bool(self._kept)

    @property
    def places(self) -> int:
        """How many granules it has room for."""
        return len(self._pool.granules)

    @property
    def held_bytes(self) -> int:
        return (self.places - len(self._free)) * self._pool.granules[:1].nbytes

    def put(self, digest: bytes, slab: KVSlab, start: int) -> None:
        """Copy a granule from a slab, which makes it the most recently used one."""
        if digest in self:
            self.touch(digest)
            return
        place = self._make_room()
        if place is None:
            return
        for mine, theirs in self._pairs(place, slab, start):
            mine.copy_(theirs)
        self._places[digest] = place

    def keep(self, digest: bytes) -> None:
        """Never evict a granule, if it is here."""
        if digest in self._places:
            self._kept[digest] = self._places.pop(digest)

    def keeps(self, digest: bytes) -> bool:
        return digest in self._kept

    def get(self, digest: bytes, slab: KVSlab, start: int) -> None:
        """Copy a granule into a slab."""
        place = self._kept[digest] if digest in self._kept else self._places[digest]
        for mine, theirs in self._pairs(place, slab, start):
            theirs.copy_(mine)

    def touch(self, digest: bytes) -> None:
        """Make a granule the most recently used one, if it is here."""
        if digest in self._places:
            self._places.move_to_end(digest)

    def _pairs(self, place: int, slab: KVSlab, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of a place in the cache, and of the slots of a slab that hold the same."""
        mine = self._pool.geometry.by_slot(self._pool.granules[place])
        return zip(mine, slab.by_slot(start, start + self._pool.granule), strict=True)

    def _make_room(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._places:
            return None
        self.evictions += 1
        return self._places.popitem(last=False)[1]


class SharedPrefixes:
    """Finds and copies what is computed already. Owned by the engine thread.

    `any_cut`: a row's bits do not depend on how its prompt is cut into steps. Where they do, only whole
    blocks that were computed as one are shared.
    """

    def __init__(
        self, share: ShareBeginnings, pool: SlabPool, *, any_cut: bool, observer: EngineObserver = UNOBSERVED
    ) -> None:
        self._share, self._granule, self._any_cut, self._observer = share, pool.granule, any_cut, observer
        self._cache = PrefixCache(pool)
        self._holders: dict[bytes, dict[TokenSequence, None]] = {}  # an ordered set for each digest
        self._held: dict[TokenSequence, list[bytes]] = {}
        self._chains: dict[tuple[TokenSequence, str], list[bytes]] = {}

    @property
    def is_on(self) -> bool:
        return self._share is not ShareBeginnings.OFF

    # What sessions have computed.

    def computed(self, sequence: TokenSequence, start: int, rows: int) -> None:
        """Rows of a prompt were computed and are history."""
        if self._any_cut:
            sequence.shareable = sequence.slab.committed
        elif start == sequence.shareable and rows == self._granule:
            sequence.shareable += rows
        self.hold(sequence)

    def rests(self, sequence: TokenSequence) -> None:
        """A generate is over: the tokens it chose are history too."""
        if self._any_cut:
            sequence.shareable = sequence.slab.committed
        self.hold(sequence)

    def hold(self, sequence: TokenSequence) -> None:
        """Let others find what this one may share."""
        if not self.is_on or sequence.error is not None:
            return
        held = self._held.setdefault(sequence, [])
        length = min(sequence.shareable, _intact(sequence.slab))
        chain, *_ = self._chains_of(sequence, length)
        for digest in chain[len(held) :]:
            self._holders.setdefault(digest, {})[sequence] = None
            held.append(digest)

    def forget(self, sequence: TokenSequence) -> None:
        """Nobody finds it any more."""
        for digest in self._held.pop(sequence, ()):
            self._drop_holder(digest, sequence)
        for scope in (sequence.owner, COMMON):
            self._chains.pop((sequence, scope), None)

    def release(self, sequence: TokenSequence) -> None:
        """Its slab is about to be given away: what no other live session has moves into the cache."""
        if not isinstance(sequence.error, InvariantViolation):
            self._save(sequence, 0)
        self.forget(sequence)

    def outgrows(self, sequence: TokenSequence) -> None:
        """The first lap is about to end: what no other live session has moves into the cache, but for what
        stays in its slot."""
        slab = sequence.slab
        self._save(sequence, slab.pinned // self._granule)  # a recall overwrites what lies behind
        held, stays = self._held.get(sequence, []), slab.untouched // self._granule
        for digest in held[stays:]:
            self._drop_holder(digest, sequence)
        del held[stays:]

    def _save(self, sequence: TokenSequence, first: int) -> None:
        """Copy its granules from `first` on into the cache, as far as no other live session has them."""
        held, slab, cache = self._held.get(sequence, []), sequence.slab, self._cache
        is_common, evictions = sequence.owner == COMMON, cache.evictions
        ends = range(self._granule, _intact(slab) + 1, self._granule)
        wanted = [
            (digest, end - self._granule)
            for digest, end in list(zip(held, ends, strict=False))[first:]
            if is_common or self._is_alone(digest, sequence, end)
        ]
        # From the end: no granule is of use without those before it, so they are to be evicted after it.
        for digest, start in reversed(wanted[: cache.places]):
            cache.put(digest, slab, start)
            if is_common:
                cache.keep(digest)
        self._observer.prefix_cache(cache.held_bytes, cache.evictions - evictions)

    def is_kept(self, token_ids: Sequence[int]) -> bool:
        """Whether all whole granules of a common prefix are in the cache, where they stay."""
        chain: list[bytes] = []
        self._lengthen(chain, COMMON, array("i", token_ids), len(token_ids) // self._granule)
        return all(map(self._cache.keeps, chain))

    # What others find.

    def match(self, sequence: TokenSequence, known: int = 0) -> int:
        """How many first tokens of a sequence others have computed; `known`: as many as were seen before."""
        first = known // self._granule
        return self._granule * max(
            self._available(chain, first) for chain in self._chains_of(sequence, _limit(sequence))
        )

    def copy(self, sequence: TokenSequence) -> int:
        """Copy what others have computed behind what the sequence has; how many tokens that were."""
        slab, start = sequence.slab, sequence.slab.written
        chains = self._chains_of(sequence, _limit(sequence))
        granules, chain = max(((self._available(chain), chain) for chain in chains), key=itemgetter(0))
        end = granules * self._granule
        if end <= start:
            return 0
        holder = self._holder(chain[granules - 1], end)
        if holder is not None:
            end = self._common_end(sequence, holder, end)
            slab.copy_slots(holder.slab, start, end)
        else:
            for index in range(start // self._granule, granules):
                self._copy_granule(slab, chain[index], index * self._granule)
            for digest in reversed(chain[:granules]):  # the end is to be evicted before the start
                self._cache.touch(digest)
        slab.written = sequence.shareable = end
        sequence.copied += end - start
        sequence.commit()
        self.hold(sequence)
        self._observer.prefix_copied(end - start)
        return end - start

    def granules(self, sequence: TokenSequence, start: int, end: int) -> Sequence[bytes]:
        """The granules that the tokens from `start` to `end` are parts of. One session need compute them."""
        chain, *_ = self._chains_of(sequence, _limit(sequence))
        return chain[start // self._granule : -(-end // self._granule)]

    def _available(self, chain: Sequence[bytes], count: int = 0) -> int:
        """How many granules of a chain, from the first on, someone has."""
        while count < len(chain) and self._has(chain[count], (count + 1) * self._granule):
            count += 1
        return count

    def _has(self, digest: bytes, end: int) -> bool:
        return self._holder(digest, end) is not None or digest in self._cache

    def _holder(self, digest: bytes, end: int) -> TokenSequence | None:
        """A live session whose slab still has the first `end` tokens; others are forgotten."""
        for sequence in list(self._holders.get(digest, ())):
            if end <= _intact(sequence.slab):
                return sequence
            self._drop_holder(digest, sequence)
        return None

    def _is_alone(self, digest: bytes, sequence: TokenSequence, end: int) -> bool:
        """Whether no other live session's slab still has the first `end` tokens."""
        others = self._holders.get(digest, {})
        return not any(each is not sequence and end <= _intact(each.slab) for each in others)

    def _drop_holder(self, digest: bytes, sequence: TokenSequence) -> None:
        holders = self._holders.get(digest, {})
        holders.pop(sequence, None)
        if not holders:
            self._holders.pop(digest, None)

    def _common_end(self, sequence: TokenSequence, holder: TokenSequence, end: int) -> int:
        """Beyond whole granules, as far as the tokens are the same, where a prompt may be cut anywhere."""
        if self._any_cut:
            most = min(_limit(sequence), holder.shareable, _intact(holder.slab))
            while end < most and sequence.tokens[end] == holder.tokens[end]:
                end += 1
        return end

    def _copy_granule(self, slab: KVSlab, digest: bytes, start: int) -> None:
        holder = self._holder(digest, start + self._granule)
        if holder is not None:
            slab.copy_slots(holder.slab, start, start + self._granule)
        else:
            self._cache.get(digest, slab, start)

    # Digests.

    def _chains_of(self, sequence: TokenSequence, length: int) -> list[list[bytes]]:
        """The digests of the sequence's first `length` tokens: for its owner, and what all may share."""
        own = COMMON if self._share is ShareBeginnings.SERVER else sequence.owner
        scopes = [own]
        if own != COMMON and self._cache.keeps_any:
            scopes.append(COMMON)
        return [self._chain(sequence, scope, length) for scope in scopes]

    def _chain(self, sequence: TokenSequence, scope: str, length: int) -> list[bytes]:
        """The digests of all whole granules of the first `length` tokens."""
        chain = self._chains.setdefault((sequence, scope), [])
        wanted = length // self._granule if self.is_on else 0
        self._lengthen(chain, scope, sequence.tokens, wanted)
        return chain if len(chain) == wanted else chain[:wanted]

    def _lengthen(self, chain: list[bytes], scope: str, tokens: "array[int]", granules: int) -> None:
        for index in range(len(chain), granules):
            before = chain[-1] if chain else scope.encode()
            granule = tokens[index * self._granule : (index + 1) * self._granule]
            chain.append(blake2b(before + granule.tobytes(), digest_size=32).digest())


def _limit(sequence: TokenSequence) -> int:
    """How many tokens it could copy: the last one is always computed, for what follows it."""
    return min(len(sequence.tokens) - 1, sequence.slab.geometry.cache.capacity)


def _intact(slab: KVSlab) -> int:
    """How many first tokens lie in the slots of their positions: all of them in the first lap of the ring.

    Up to the capacity, rows that were taken back cannot have reached the second lap: the spare slots hold
    them, or what they overwrote was put back.
    """
    cache = slab.geometry.cache
    in_first_lap = slab.committed < cache.capacity and slab.written <= cache.slots
    return slab.committed if in_first_lap else min(slab.untouched, slab.committed)
