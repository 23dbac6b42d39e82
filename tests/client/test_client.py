"""What the SDK promises: its names, its signatures, its weight."""

import inspect
from collections.abc import Callable

import pytest

import kakeya
import kakeya.client
from kakeya.client import AsyncClient, AsyncSession, AsyncStream, Client, GenerateOptions, Session, Stream
from support.programs import processor_seconds

NAMES = [
    "TLS",
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "Client",
    "GenerateOptions",
    "GenerateResult",
    "Keepalive",
    "Retry",
    "ServerInfo",
    "Session",
    "SessionInfo",
    "StopReason",
    "Stream",
    "Token",
    "TokenLogprob",
    "TokenRange",
]
CONNECTING = ["target", "api_key", "model", "tls", "timeout", "retry", "keepalive"]
CLIENT = {
    "close": [],
    "create_session": [
        *("label", "system", "eos_token_ids", "ignore_eos", "pinned_prefix_tokens", "recall_tokens"),
    ],
    "import_session": ["file", "label"],
    "list_sessions": [],
    "server_info": [],
    "session": ["session_id"],
    "tokenizer": None,
}
SESSION = {
    "append": ["token_ids", "expected_history_length"],
    "chat": ["text", "max_tokens", "options"],
    "close": [],
    "export": [],
    "fork": [],
    "generate": ["max_tokens", "options"],
    "info": [],
    "recall": ["ranges", "remember"],
    "last_result": None,
    "session_id": None,
}
OPTIONS = [
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "logprobs",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
    "temperature",
    "timeout",
    "top_k",
    "top_p",
]


def parameters(function: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def surface(kind: type) -> dict[str, list[str] | None]:
    """Public methods with their parameters; None for a property."""
    members = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
    return {
        name: None if isinstance(member, property) else parameters(member) for name, member in members.items()
    }


def test_the_names() -> None:
    assert sorted(kakeya.client.__all__, key=str.lower) == sorted(NAMES, key=str.lower)
    assert all(hasattr(kakeya.client, name) for name in NAMES)
    assert kakeya.__all__ == ["AsyncClient", "Client", "__version__"]
    assert kakeya.Client is Client
    assert kakeya.AsyncClient is AsyncClient
    assert {"Client", "AsyncClient"} <= set(dir(kakeya))
    with pytest.raises(AttributeError, match="Klient"):
        kakeya.Klient  # noqa: B018


@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_a_client_has_exactly_this(kind: type) -> None:
    assert surface(kind) == CLIENT
    assert parameters(kind) == CONNECTING


@pytest.mark.parametrize("plain, asynchronous", [(Client, AsyncClient), (Session, AsyncSession)])
def test_the_plain_client_takes_the_same_arguments(plain: type, asynchronous: type) -> None:
    names = ["__init__"] if plain is Client else []
    names += [name for name, member in surface(plain).items() if member is not None]
    for name in names:
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (plain, asynchronous))
        assert list(ours.parameters.values()) == list(theirs.parameters.values()), name


@pytest.mark.parametrize("kind", [AsyncSession, Session])
def test_a_session_has_exactly_this(kind: type) -> None:
    assert surface(kind) == SESSION


def test_a_stream_has_exactly_this() -> None:
    assert surface(AsyncStream) == {"aclose": [], "cancel": [], "result": None}
    assert surface(Stream) == {"close": [], "cancel": [], "result": None}


def test_the_options_of_a_generate() -> None:
    assert sorted(GenerateOptions.__annotations__) == OPTIONS


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_documented(name: str) -> None:
    thing = getattr(kakeya.client, name)
    assert inspect.getdoc(thing)
    for method, member in vars(thing).items():
        if not method.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{name}.{method}"


def test_importing_is_quick_and_light() -> None:
    program = (
        "import sys\nfrom kakeya import AsyncClient, Client\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'jinja2', 'kakeya.models'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    best = min(processor_seconds(program) - processor_seconds("pass") for _ in range(3))
    assert best < 0.9  # about 0.3 where nothing else runs; a shared core is slower


def test_chat_needs_no_torch() -> None:
    processor_seconds(
        "import sys, kakeya.client.chat\n"
        "heavy = {'torch', 'numpy', 'kakeya.models'} & set(sys.modules)\nassert not heavy, heavy"
    )
