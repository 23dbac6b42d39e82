"""Between wire messages and the runtime's own nouns."""

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

import kakeya
from kakeya.errors import InvalidArgument
from kakeya.types import (
    DoneEvent,
    SamplingParams,
    SessionInfo,
    StopReason,
    TokenEvent,
    TokenizerFiles,
    TokenRange,
    TruncatedEvent,
)
from kakeya.wire import runtime_pb2 as pb

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

DEFAULT_PAGE_SIZE = 100
PART_BYTES = 2**20

_STOP_REASONS = {
    StopReason.MAX_TOKENS: pb.MAX_TOKENS,
    StopReason.EOS: pb.EOS,
    StopReason.CANCELLED: pb.CANCELLED,
    StopReason.TRUNCATED: pb.TRUNCATED,
}
_SAMPLING_FIELDS = (
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)


def optional(message: Any, field: str) -> int | None:
    """The value of an optional integer field, None where the client left it out."""
    return getattr(message, field) if message.HasField(field) else None


def eos_token_ids(request: pb.CreateSessionRequest) -> Sequence[int] | None:
    """The tokens that end a generate; None for the model's own. Raises InvalidArgument."""
    if request.ignore_eos and request.eos_token_ids:
        raise InvalidArgument("ignore_eos and eos_token_ids exclude each other")
    if request.ignore_eos:
        return ()
    return list(request.eos_token_ids) or None


def sampling(request: pb.GenerateRequest) -> SamplingParams:
    """How to choose tokens. Fields left out keep their defaults. Raises InvalidArgument naming a bad one."""
    given = {name: getattr(request, name) for name in _SAMPLING_FIELDS if request.HasField(name)}
    return SamplingParams(
        **given,
        logit_bias=dict(request.logit_bias),
        logprobs=request.HasField("logprobs"),
        top_logprobs=request.logprobs,
        ignore_eos=request.ignore_eos,
        stop_token_ids=tuple(request.stop_token_ids),
    )


def generate_event(event: TruncatedEvent | TokenEvent | DoneEvent) -> pb.GenerateEvent:
    match event:
        case TokenEvent():
            return pb.GenerateEvent(token=_token(event))
        case TruncatedEvent():
            return pb.GenerateEvent(truncated=pb.Truncated(dropped_token_count=event.dropped_token_count))
        case DoneEvent():
            return pb.GenerateEvent(done=_done(event))


def grouped(events: Sequence[TruncatedEvent | TokenEvent | DoneEvent]) -> Iterator[pb.GenerateEvent]:
    """The messages for events that are ready together: neighbouring tokens share one."""
    for _, group in groupby(events, key=type):
        alike = list(group)
        tokens = [_token(event) for event in alike if isinstance(event, TokenEvent)]
        if tokens:
            yield pb.GenerateEvent(tokens=pb.Tokens(tokens=tokens))
        else:
            yield from map(generate_event, alike)


def _token(event: TokenEvent) -> pb.Token:
    if event.logprob is None:
        return pb.Token(id=event.token_id)
    top = [pb.TokenLogprob(id=other.token_id, logprob=other.logprob) for other in event.top_logprobs]
    return pb.Token(id=event.token_id, logprob=event.logprob, top_logprobs=top)


def _done(event: DoneEvent) -> pb.Done:
    figures = _fields_of(event, pb.Done, besides="stop_reason")
    return pb.Done(stop_reason=_STOP_REASONS[event.stop_reason], **figures)


def session_info(info: SessionInfo) -> pb.GetSessionInfoResponse:
    return pb.GetSessionInfoResponse(**_fields_of(info, pb.GetSessionInfoResponse))


def state_parts(file: Sequence[bytes | memoryview]) -> Iterator[pb.StatePart]:
    """The messages that carry a file."""
    for each in file:
        part = memoryview(each)
        for start in range(0, len(part), PART_BYTES):
            yield pb.StatePart(data=bytes(part[start : start + PART_BYTES]))


async def imported_file(
    requests: AsyncIterator[pb.ImportSessionRequest], longest: int
) -> tuple[bytearray, pb.ImportSessionRequest]:
    """The file that messages carry, and the first of them. Raises InvalidArgument for one too long."""
    file, first = bytearray(), pb.ImportSessionRequest()
    async for request in requests:
        if not file:
            first = request
        file += request.data
        if len(file) > longest:
            raise InvalidArgument(f"a session of this server has at most {longest:,} bytes, and more came")
    return file, first


def _fields_of(noun: object, kind: type[Message], besides: str = "") -> dict[str, Any]:
    """The attributes of a noun that have the names of the message's fields."""
    names = (field.name for field in kind.DESCRIPTOR.fields)
    given = {name: getattr(noun, name) for name in names if name != besides}
    return {name: token_ranges(each) if isinstance(each, tuple) else each for name, each in given.items()}


def token_ranges(ranges: Sequence[TokenRange]) -> list[pb.TokenRange]:
    return [pb.TokenRange(start=each.start, end=each.end) for each in ranges]


def ranges_of(request: pb.RecallTokensRequest) -> list[TokenRange]:
    return [TokenRange(each.start, each.end) for each in request.ranges]


def server_info(runtime: "Runtime") -> pb.GetServerInfoResponse:
    facts, model = runtime.describe(), runtime.model_config
    return pb.GetServerInfoResponse(
        version=kakeya.__version__,
        model_id=facts.model,
        model_fingerprint=runtime.fingerprint,
        layers=model.num_layers,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        sink=facts.sink,
        window=facts.window,
        capacity=facts.capacity,
        kv_bytes_per_session=facts.session_bytes,
        features=_features(runtime),
        eos_token_ids=model.eos_token_ids,
        proposer=facts.proposer,
        recall_tokens=facts.recall,
    )


def _features(runtime: "Runtime") -> list[str]:
    facts = runtime.describe()
    found = ["fork", "list", "logprobs", "request-ids", "export", f"{facts.numerics}-numerics"]
    found += ["recall"] if facts.recall else []
    return found + (["durable"] if runtime.settings.state is not None else [])


def tokenizer(files: TokenizerFiles) -> pb.GetTokenizerResponse:
    return pb.GetTokenizerResponse(
        tokenizer_json=files.tokenizer_json.decode(),
        chat_template=files.chat_template or "",
        bos_token=files.bos_token,
        eos_token=files.eos_token,
        unk_token=files.unk_token,
        pad_token=files.pad_token,
    )
