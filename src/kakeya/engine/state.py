"""A session's full state, as files have it: tokens, keys, values, positions, and the names of what made them.

The file is safetensors. Its metadata carries the format, the model's fingerprint and the slab's
geometry; a file that does not fit is refused before anything changes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kakeya.engine.device import DeviceEvent, deliver, fetch, receive
from kakeya.engine.recall import Ranges, Turn, brought_back, check_ranges, tokens_in
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import SlabGeometry, recalled_positions
from kakeya.errors import StateMismatch
from kakeya.types import TokenRange

FORMAT = "kakeya-session"
VERSION = "3"
# The first knew no recall. In the second, what was recalled was filled up with the beginning of the history.
_FILLED_UP = "2"
_READABLE = ("1", _FILLED_UP, VERSION)
DRAFT_PREFIX = "draft."
DRAFT_LAYERS = "device.layers"


@dataclass(frozen=True, kw_only=True)
class SequenceState:
    """Everything a sequence is, for other threads to read. `storage` may lie on a device."""

    fingerprint: str
    geometry: str
    sink: int
    committed: int
    eos_token_ids: tuple[int, ...]
    tokens: Tensor
    storage: Tensor
    positions: Tensor
    draft: Mapping[str, Tensor]
    notes: str = ""
    """The caller's own text, kept with the state."""
    ready: DeviceEvent | None = None
    """When the device has written the storage; None if it has."""
    recall: "RecallState | None" = None


@dataclass(frozen=True)
class RecallState:
    """What a session with slots for recall has beside its slab."""

    slots: int
    recalled: Ranges
    remembered: Ranges
    wanted: Ranges | None
    turn_from: int
    past: tuple[Turn, ...] = ()
    """Turns whose tokens are to be computed again."""
    seconds: float = 0.0
    """What the last recall took."""

    @property
    def sees(self) -> Ranges:
        """What the next token sees of the past beside the window: the slots hold it by then."""
        return self.past[-1].ranges if self.past else self.recalled

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RecallState":
        facts = json.loads(text)
        wanted = None if facts["wanted"] is None else _ranges(facts["wanted"])
        slots, turn_from = int(facts["slots"]), int(facts["turn_from"])
        # Earlier versions wrote neither of these.
        past = tuple(Turn(int(at), _ranges(ranges)) for at, ranges in facts.get("past", ()))
        seconds = float(facts.get("seconds", 0.0))
        recalled, remembered = _ranges(facts["recalled"]), _ranges(facts["remembered"])
        return cls(slots, recalled, remembered, wanted, turn_from, past, seconds)


def _ranges(written: Sequence[Mapping[str, int]]) -> Ranges:
    if not all(type(each[name]) is int for each in written for name in ("start", "end")):
        raise ValueError("ranges are not of whole numbers")
    return tuple(TokenRange(each["start"], each["end"]) for each in written)


def snapshot(sequence: TokenSequence, fingerprint: str, notes: str) -> SequenceState:
    """Copy a resting sequence's state where it lies. Call on the engine thread; nothing is waited for."""
    slab = sequence.slab
    positions = slab.slot_positions()
    held = slab.indices(np.flatnonzero(positions >= 0))
    storage = torch.zeros_like(slab.storage)
    parts = slab.geometry.by_slot(slab.storage)
    for copy, part in zip(slab.geometry.by_slot(storage), parts, strict=True):
        copy.index_copy_(3, held, part.index_select(3, held))
    model_layers = slab.geometry.model_layers
    draft = dict(sequence.draft.export()) if sequence.draft is not None else {}
    if slab.geometry.draft_layers:
        draft[DRAFT_LAYERS] = storage[model_layers:]
    return SequenceState(
        fingerprint=fingerprint,
        geometry=geometry_name(slab.geometry),
        sink=slab.sink,
        committed=slab.committed,
        eos_token_ids=tuple(sorted(sequence.eos_token_ids)),
        tokens=torch.tensor(sequence.tokens, dtype=torch.int32),
        storage=storage[:model_layers],
        positions=torch.from_numpy(positions),
        draft=draft,
        notes=notes,
        ready=DeviceEvent(slab.pool.device).record(),
        recall=recall_of(sequence),
    )


def recall_of(sequence: TokenSequence) -> RecallState | None:
    """What a session has beside its slab; None for one without recall."""
    slab, session = sequence.slab, sequence.recall
    if session is None:
        return None
    return RecallState(
        slots=slab.recall,
        recalled=slab.recalled,
        remembered=session.remembered,
        wanted=session.wanted,
        turn_from=session.turn_from,
        past=session.past,
        seconds=session.seconds,
    )


def restore(sequence: TokenSequence, state: SequenceState) -> None:
    """Fill a fresh sequence from a checked state. Call on the engine thread."""
    slab = sequence.slab
    model_layers = slab.geometry.model_layers
    slab.storage[:model_layers].copy_(receive(state.storage, state.ready))
    draft_layers = state.draft.get(DRAFT_LAYERS)
    if draft_layers is not None and draft_layers.shape == slab.storage[model_layers:].shape:
        slab.storage[model_layers:].copy_(draft_layers)  # a drafter that has no history guesses worse
    slab.written = slab.committed = state.committed
    sequence.restore(state.tokens.tolist())
    if state.recall is not None:
        restore_recall(sequence, state.recall)


def restore_recall(sequence: TokenSequence, kept: RecallState) -> None:
    """What a session had beside its slab. Call on the engine thread."""
    session, slab = sequence.recall, sequence.slab
    if session is not None:
        slab.recalled, slab.untouched = kept.recalled, slab.pinned
        slab.holds = recalled_positions(kept.recalled, slab.pinned, slab.recall)
        session.remembered, session.wanted, session.turn_from = kept.remembered, kept.wanted, kept.turn_from
        session.past, session.seconds = kept.past, kept.seconds


def geometry_name(geometry: SlabGeometry, *, spare: bool = True) -> str:
    """The geometry in a form that two files can be compared by; without `spare`, with what must agree."""
    facts = asdict(geometry)
    if not spare:
        del facts["cache"]["spare"]
    facts["layers"] -= facts.pop("draft_layers")  # a session moves between servers with and without a drafter
    if not geometry.cache.recall:
        del facts["cache"]["recall"]  # as files from before there was recall have it
    if not geometry.layer_heads:
        del facts["layer_heads"]  # as files from before there were such layers have it
    return json.dumps(facts, sort_keys=True)


def on_device(state: SequenceState, device: torch.device) -> SequenceState:
    """The same with its storage on `device`. Not for the engine thread, which must not wait."""
    storage, ready = deliver(state.storage, device)
    return replace(state, storage=storage, ready=ready)


def on_host(state: SequenceState) -> SequenceState:
    """The same with nothing left on a device. Not for the engine thread, which must not wait."""
    draft = {name: fetch(tensor, state.ready) for name, tensor in state.draft.items()}
    return replace(state, storage=fetch(state.storage, state.ready), draft=draft, ready=None)


def state_contents(state: SequenceState) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a state file, as views. The state must be on the host."""
    tensors = {
        "keys": state.storage[:, 0],
        "values": state.storage[:, 1],
        "tokens": state.tokens,
        "positions": state.positions,
        **{DRAFT_PREFIX + name: tensor for name, tensor in state.draft.items()},
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model": state.fingerprint,
        "geometry": state.geometry,
        "sink": str(state.sink),
        "committed": str(state.committed),
        "ring_index": str(_ring_index(state)),
        "eos_token_ids": json.dumps(state.eos_token_ids),
        "notes": state.notes,
        **({"recall": state.recall.to_json()} if state.recall is not None else {}),
    }
    return tensors, metadata


def check_header(source: str, metadata: Mapping[str, str], fingerprint: str, geometry: SlabGeometry) -> None:
    """Raises StateMismatch for state that another model, geometry or format has made."""
    if metadata.get("format") != FORMAT or metadata.get("version") not in _READABLE:
        raise StateMismatch(f"{source} is not a {FORMAT} file of version {', '.join(_READABLE)}")
    if metadata.get("model") != fingerprint:
        raise StateMismatch(
            f"{source} belongs to another model or weight format: {metadata.get('model')}, here {fingerprint}"
        )
    if not _fits(metadata.get("geometry", ""), geometry):
        raise StateMismatch(
            f"{source} has another cache geometry: {metadata.get('geometry')}, here {geometry_name(geometry)}"
        )


def _fits(name: str, geometry: SlabGeometry) -> bool:
    """Whether slabs of a geometry of this name can be moved into ours: all but the spare slots must agree."""
    try:
        theirs, mine = json.loads(name), json.loads(geometry_name(geometry))
        del theirs["cache"]["spare"], mine["cache"]["spare"]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(theirs == mine)


def _in_our_slots(
    storage: Tensor, positions: Tensor, sink: int, geometry: SlabGeometry
) -> tuple[Tensor, Tensor]:
    """The same keys and values, and positions, in the slots where a slab with our spare slots has them."""
    held = np.flatnonzero(positions.numpy() >= 0)
    slots = geometry.slots_of(positions.numpy()[held], sink)
    ours = torch.from_numpy(np.where(held < sink, held, slots))  # what is pinned may be of any position
    moved = torch.zeros(geometry.model_layers, *geometry.shape[1:], dtype=storage.dtype)
    theirs = torch.from_numpy(held)
    for copy, part in zip(geometry.by_slot(moved), geometry.by_slot(storage), strict=True):
        copy.index_copy_(3, ours, part.index_select(3, theirs))
    return moved, torch.full((geometry.cache.slots,), -1).index_copy_(0, ours, positions[theirs])


def _joined(keys: Tensor, values: Tensor) -> Tensor:
    """Keys and values as one tensor [layers, 2, kv_heads, slots, head_dim]: a view where they lie one behind
    the other, as in a file of 16-bit numbers, since to copy them takes longer than to check them."""
    in_one = keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    follows = keys.storage_offset() + keys.numel() == values.storage_offset()
    if not in_one or not follows or keys.shape != values.shape or keys.dtype != values.dtype:
        return torch.stack([keys, values], dim=1)
    return keys.as_strided((2, *keys.shape), (keys.numel(), *keys.stride())).transpose(0, 1)


def _is_first_lap(metadata: Mapping[str, str], positions: Tensor, geometry: SlabGeometry) -> bool:
    """Whether each position is in the slot of its number, here as there."""
    return int(metadata["committed"]) <= len(positions) <= geometry.cache.slots


def parse_state(
    metadata: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    geometry: SlabGeometry,
    *,
    partial: bool = False,
) -> SequenceState:
    """A state whose header was checked. With `partial` it may lack the last slots, where nothing was written.

    Raises KeyError, ValueError or TypeError for damaged ones.
    """
    storage = _joined(tensors["keys"], tensors["values"])
    positions, sink = tensors["positions"], int(metadata["sink"])
    expected = (geometry.model_layers, *geometry.shape[1:3], len(positions), geometry.head_dim)
    if tuple(storage.shape) != expected:
        raise ValueError(f"keys and values have shape {tuple(storage.shape)}, expected {expected}")
    is_short = partial and _is_first_lap(metadata, positions, geometry)
    if len(positions) != geometry.cache.slots and not is_short:
        storage, positions = _in_our_slots(storage, positions, sink, geometry)
    drafts = {name: tensor for name, tensor in tensors.items() if name.startswith(DRAFT_PREFIX)}
    state = SequenceState(
        fingerprint=metadata["model"],
        geometry=geometry_name(geometry),
        sink=sink,
        committed=int(metadata["committed"]),
        eos_token_ids=tuple(json.loads(metadata["eos_token_ids"])),
        tokens=tensors["tokens"],
        storage=storage,
        positions=positions,
        draft={name.removeprefix(DRAFT_PREFIX): tensor for name, tensor in drafts.items()},
        notes=metadata["notes"],
        recall=checked_recall(metadata, len(tensors["tokens"]), geometry),
    )
    if not 0 <= state.committed <= max(0, len(state.tokens) - 1):
        raise ValueError(f"{state.committed} tokens computed of a history of {len(state.tokens)}")
    return state


def checked_recall(metadata: Mapping[str, str], length: int, geometry: SlabGeometry) -> "RecallState | None":
    """What the file of a session of `length` tokens says of recall. Raises ValueError or InvalidArgument for
    what no session can have recalled."""
    if "recall" not in metadata:
        return None
    recall, sink = RecallState.from_json(metadata["recall"]), int(metadata["sink"])
    check_recall(recall, sink, length, int(metadata["committed"]), geometry)
    if metadata["version"] != _FILLED_UP:
        return recall
    held = _filled_up(recall.recalled, sink - recall.slots, recall.slots)
    _check_fit(held, recall.slots, length)
    return replace(recall, recalled=held)


def _filled_up(recalled: Ranges, pinned: int, slots: int) -> Ranges:
    """With the earliest tokens behind the pinned ones that the slots held beside these."""
    if not recalled:
        return ()
    named = np.concatenate([np.arange(each.start, each.end) for each in recalled])
    others = np.setdiff1d(np.arange(pinned, pinned + slots), named)
    held = np.sort(np.concatenate([others[: slots - len(named)], named]))
    pieces = np.split(held, np.flatnonzero(np.diff(held) != 1) + 1)
    return tuple(TokenRange(int(piece[0]), int(piece[-1]) + 1) for piece in pieces)


def check_recall(recall: RecallState, sink: int, length: int, committed: int, geometry: SlabGeometry) -> None:
    """Raises ValueError or InvalidArgument for what a session of `length` tokens cannot have recalled."""
    if not 0 < recall.slots <= sink or not 0 <= recall.turn_from <= length:
        raise ValueError(f"{recall} in a session that pins {sink} of {length} tokens")
    named = brought_back(recall.wanted, recall.remembered)  # a turn brings back both at once
    for ranges in (recall.recalled, recall.remembered, recall.wanted or (), named):
        _check_fit(ranges, recall.slots, length)
    before = max(committed, geometry.cache.capacity) - 1
    for turn in recall.past:
        if not before < turn.at < length:
            raise ValueError(f"{turn} in a history of {length} tokens, of which {committed} are computed")
        _check_fit(turn.ranges, recall.slots, turn.at)
        before = turn.at
    seen = [recall.recalled, recall.wanted or (), *(turn.ranges for turn in recall.past)]
    if any(each.start < sink - recall.slots for ranges in seen for each in ranges):
        raise ValueError(f"{recall} brings back what is pinned")


def _check_fit(ranges: Ranges, slots: int, length: int) -> None:
    check_ranges(ranges, length)
    if tokens_in(ranges) > slots:
        raise ValueError(f"{ranges} in {slots} slots")


def _ring_index(state: SequenceState) -> int:
    ring = state.storage.shape[3] - state.sink
    return (
        state.sink + (state.committed - state.sink) % ring
        if state.committed >= state.sink
        else state.committed
    )
