"""`kakeya serve`: where settings come from, what is refused, and the arithmetic of memory."""

import logging
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.cli.memory import MOST_BY_DEFAULT, Budget, fitting_capacity
from kakeya.cli.serve_options import ServeOptions
from kakeya.config import AdmissionConfig, ServerConfig, TlsConfig
from kakeya.errors import ConfigError
from kakeya.serving.keys import hash_key
from kakeya.types import AdmissionPolicy
from support.cli import Outcome, Run


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """`main` takes over SIGTERM and `serve` the logs; give them back."""
    usual = signal.getsignal(signal.SIGTERM)
    loggers = [logging.getLogger(name) for name in ("kakeya", "grpc", "asyncio", "uvicorn")]
    states = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    signal.signal(signal.SIGTERM, usual)
    for logger, (handlers, propagate, level) in zip(loggers, states, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def settings(outcome: Outcome) -> dict[str, object]:
    assert outcome.status == 0, outcome.err
    return tomllib.loads(outcome.out)


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kakeya.toml"
    file.write_text('window = 100\nsink = 10\nbind = "127.0.0.1:1"\nlog-format = "json"\n')
    monkeypatch.setenv("KAKEYA_WINDOW", "200")
    monkeypatch.setenv("KAKEYA_SINK", "20")
    outcome = run("serve", "--config", str(file), "--window", "300", "--print-config")
    given = settings(outcome)
    assert (given["window"], given["sink"], given["bind"]) == (300, 20, "127.0.0.1:1")
    assert (given["log-format"], given["max-concurrent-rpcs"]) == ("json", 1024)
    lines = outcome.out.splitlines()
    assert "window = 300  # flag" in lines
    assert "sink = 20  # environment" in lines
    assert 'bind = "127.0.0.1:1"  # file' in lines
    assert "max-concurrent-rpcs = 1024  # default" in lines
    assert "# capacity is not set" in lines


def test_what_is_printed_can_be_read_back(run: Run, tmp_path: Path) -> None:
    arguments = ("--numerics", "exact", "--insecure", "--keepalive-s", "7.5", "--capacity", "3")
    first = run("serve", *arguments, "--print-config")
    shown = [line for line in first.out.splitlines() if not line.startswith("print-config")]
    (tmp_path / "shown.toml").write_text("\n".join(shown))
    second = run("serve", "--config", str(tmp_path / "shown.toml"), "--print-config")
    expected = settings(first) | {"config": str(tmp_path / "shown.toml")}
    assert settings(second) == expected


def test_every_flag_has_an_environment_twin(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text("")
    values = {
        "model": "m", "backend": "cpu", "sink": 1, "window": 2, "dtype": "float32", "weights": "int8",
        "numerics": "exact", "kernels": "torch", "threads": 3, "max-batch-tokens": 512, "capacity": 5,
        "memory-budget": "1GB", "bind": "127.0.0.1:9", "tls-cert": "c", "tls-key": "k", "tls-client-ca": "a",
        "insecure": True, "shutdown-grace-s": 1.5, "keepalive-s": 2.5, "keepalive-timeout-s": 3.5,
        "api-key-file": "keys", "max-concurrent-rpcs": 6, "max-message-bytes": 2048,
        "session-idle-ttl-s": 4.5, "quota-sessions": 7, "quota-concurrent-requests": 8,
        "quota-tokens-per-minute": 9, "metrics-port": 10, "metrics-host": "h", "log-level": "debug",
        "log-format": "json", "config": str(tmp_path / "c.toml"), "print-config": True,
        "http": "127.0.0.1:11", "max-concurrent": 12, "admission": "reject", "queue-max-wait-s": 13.5,
        "queue-depth": 14, "max-connections": 15, "max-body-bytes": 1616, "receive-timeout-s": 17.5,
        "request-timeout-s": 18.5, "default-max-tokens": 19, "stored-responses": 20, "chat-matching": False,
        "held-conversations": 21, "chat-deprecation": False, "chat-sunset": "2031-02-03",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv("KAKEYA_" + name.upper().replace("-", "_"), str(value))
    monkeypatch.setenv("KAKEYA_API_KEY", "one two")
    monkeypatch.setenv("KAKEYA_CORS_ORIGIN", "https://a.example https://b.example")
    values["cors-origin"] = ["https://a.example", "https://b.example"]
    outcome = run("serve")
    assert settings(outcome) == values
    assert "# api-key is set by environment, and not shown" in outcome.out.splitlines()
    fields = {field.replace("_", "-") for field in ServeOptions.__dataclass_fields__}
    assert fields == set(values) | {"api-key"}


def test_keys_come_from_flags_environment_and_file_and_are_never_shown(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# mine\n\n  third-key  \nthird-key\n")
    options = ServeOptions(api_key=["first-key", "second-key"], api_key_file=keys)
    expected = tuple(hash_key(key) for key in ("first-key", "second-key", "third-key"))
    assert options.server_config().key_hashes == expected
    outcome = run("serve", "--api-key", "first-key", "--print-config")
    assert "first-key" not in outcome.out + outcome.err
    assert "# api-key is set by flag, and not shown" in outcome.out


def refusal(run: Run, *arguments: str) -> str:
    outcome = run("serve", *arguments)
    assert outcome.status == 2
    assert outcome.out == ""
    return outcome.err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--window", "0"), "window must be a whole number from 1"),
        (("--capacity", "0"), "capacity must be a whole number from 1"),
        (("--backend", "cuda"), "there is no CUDA device"),
        (("--bind", "nowhere"), "bind must be HOST:PORT"),
        (("--memory-budget", "much"), "memory-budget must look like 8GB"),
        (("--memory-budget", "0GB"), "memory-budget must look like 8GB"),
        (("--memory-budget", "150%"), "memory-budget must look like 8GB"),
        (("--tls-cert", "a.pem"), "TLS needs both --tls-cert and --tls-key"),
        (("--tls-client-ca", "a.pem"), "TLS needs both"),
        (("--api-key", "two words"), "an API key must be printable ASCII"),
        (("--api-key-file", "no-such-file"), "the key file no-such-file cannot be read"),
        (("--api-key-file", "/dev/null"), "holds no key"),
        (("--session-idle-ttl-s", "-1"), "session_idle_ttl_s must be"),
        (("--quota-sessions", "0"), "max_sessions must be a whole number"),
        (("--max-batch-tokens", "1"), "max_batch_tokens must be at least"),
        (("--config", "no-such-file.toml"), "no-such-file.toml cannot be read"),
        (("--metrics-port", "99999999"), "cannot serve metrics on 127.0.0.1:99999999"),
        (("--http", "nowhere"), "bind must be HOST:PORT"),
        (("--http", "0.0.0.0:8000"), "0.0.0.0:8000 is not a loopback address"),
        (("--max-concurrent", "0"), "max_concurrent must be a whole number from 1"),
        (("--queue-max-wait-s", "-1"), "queue_max_wait_s must be a number of seconds from 0"),
        (("--queue-depth", "0"), "queue_depth must be a whole number from 1"),
        (("--max-body-bytes", "1"), "max_body_bytes must be a whole number from 1024"),
        (("--cors-origin", "example.org"), "cors_origins must be like https://example.org or *"),
        (("--chat-sunset", "soon"), "chat_sunset must be a day like 2027-12-31, got 'soon'"),
    ],
)
def test_a_bad_setting_is_one_line(run: Run, arguments: tuple[str, ...], words: str) -> None:
    said = refusal(run, *arguments)
    assert said.startswith("kakeya: ")
    assert said.count("\n") == 1
    assert words in said


@pytest.mark.parametrize(
    "content, words",
    [
        ("windw = 5", "there is no setting 'windw'"),
        ("[serve]\nwindow = 5", "there is no setting 'serve'"),
        ("config = 'x'", "there is no setting 'config'"),
        ("window = ", "cannot be read"),
    ],
)
def test_a_bad_file_is_named(run: Run, tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "bad.toml").write_text(content)
    said = refusal(run, "--config", str(tmp_path / "bad.toml"))
    assert "bad.toml" in said
    assert words in said


@pytest.mark.parametrize("content", ["window = 1.5", "window = true", 'window = "wide"', "window = [1, 2]"])
def test_a_value_of_the_wrong_kind_is_refused(run: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.toml").write_text(content)
    assert "window" in refusal(run, "--config", str(tmp_path / "bad.toml"), "--print-config")


def test_underscores_and_lists_are_fine_in_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text('max_batch_tokens = 512\napi-key = ["one", "two"]\ninsecure = true\n')
    outcome = run("serve", "--config", str(tmp_path / "good.toml"), "--print-config")
    given = settings(outcome)
    assert (given["max-batch-tokens"], given["insecure"]) == (512, True)
    assert "# api-key is set by file, and not shown" in outcome.out


@pytest.mark.parametrize(
    "keys, words",
    [(("a-key",), ["plain text"]), ((), ["anybody may call it", "plain text"])],
)
def test_an_open_door_needs_to_be_asked_for(run: Run, keys: tuple[str, ...], words: list[str]) -> None:
    given = [part for key in keys for part in ("--api-key", key)]
    said = refusal(run, "--bind", "0.0.0.0:0", *given)
    assert "0.0.0.0:0 is not a loopback address" in said
    assert "--insecure" in said
    assert all(word in said for word in words)
    assert ("anybody" in said) is ("anybody may call it" in words)


def test_keys_and_tls_open_the_door(tmp_path: Path) -> None:
    options = ServeOptions(
        bind="0.0.0.0:0", api_key=["a-key"], tls_cert=tmp_path / "c", tls_key=tmp_path / "k"
    )
    assert options.server_config().exposures == ()
    assert ServerConfig(bind="0.0.0.0:0", insecure=True).exposures


def test_http_can_be_off_and_shares_keys_and_tls_with_grpc(tmp_path: Path) -> None:
    assert ServeOptions(http="off").http_config() is None
    http = ServeOptions(
        http="0.0.0.0:0",
        api_key=["a-key"],
        tls_cert=tmp_path / "c",
        tls_key=tmp_path / "k",
        cors_origin=["*"],
        chat_sunset="2031-02-03",
        chat_matching=False,
    ).http_config()
    assert http is not None
    assert (http.key_hashes, http.exposures) == ((hash_key("a-key"),), ())
    assert http.tls == TlsConfig(tmp_path / "c", tmp_path / "k")
    assert (http.cors_origins, http.chat_matching, http.chat_sunset.year) == (("*",), False, 2031)


def test_admission_follows_from_its_flags() -> None:
    options = ServeOptions(
        max_concurrent=3, admission=AdmissionPolicy.REJECT, queue_depth=4, queue_max_wait_s=5
    )
    assert options.admission_config() == AdmissionConfig(3, AdmissionPolicy.REJECT, 5, 4)


# Memory.


@pytest.mark.parametrize(
    "text, expected",
    [
        ("1000000", 10**6), ("8GB", 8 * 10**9), ("1.5 MB", 1_500_000), ("512MiB", 2**29),
        ("2gib", 2**31), ("25%", 2_500_000_000), ("100 %", 10**10), ("64 kB", 64_000),
    ],
)  # fmt: skip
def test_a_budget_is_bytes_or_a_share(text: str, expected: int) -> None:
    assert Budget.parse(text).bytes_of(10**10) == expected


def capacity(asked: int | None, budget: str, available: int = 10**9, bytes_per_token: int = 1000) -> int:
    return fitting_capacity(
        asked, Budget.parse(budget), bytes_per_token=bytes_per_token, slots=1000, available=available
    )


def test_capacity_is_what_the_budget_holds() -> None:
    assert capacity(None, "50%") == 500
    assert capacity(None, "20MB") == 20
    assert capacity(7, "20MB") == 7
    assert capacity(20, "20MB") == 20
    assert capacity(None, "50%", bytes_per_token=1) == MOST_BY_DEFAULT
    assert capacity(5000, "50%", bytes_per_token=1) == 5000


def test_more_than_fits_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as refused:
        capacity(600, "50%")
    assert str(refused.value) == (
        "capacity 600 does not fit: 1,000 bytes per token x 1,000 slots = 1,000,000 bytes per session, "
        "x 600 sessions = 600.0 MB, and the memory budget is 500.0 MB (50% of 1.0 GB free): room for 500. "
        "Lower --capacity or --window, or raise --memory-budget"
    )
    with pytest.raises(ConfigError, match="capacity 1 does not fit.*room for 0"):
        capacity(None, "10kB")
    with pytest.raises(ConfigError, match="a memory budget of 2.0 GB is more than the 1.0 GB free"):
        capacity(1, "2GB")
