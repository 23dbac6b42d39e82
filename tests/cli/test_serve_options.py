"""The settings of `kakeya serve`: where they come from and what is refused."""

from pathlib import Path

import pytest

from kakeya.cli.serve_options import ServeOptions
from kakeya.serving.config import AdmissionConfig, ServerConfig, TlsConfig
from kakeya.serving.keys import hash_key
from kakeya.types import AdmissionPolicy
from support.programs import Run

pytestmark = pytest.mark.usefixtures("usual_logs")


def test_every_flag_has_an_environment_twin(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text("")
    values = {
        "model": "m", "backend": "cpu", "sink": 1, "window": 2, "recall": 3, "dtype": "float32",
        "weights": "int8",
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
        "share-beginnings": "server", "prefix-cache-bytes": 22, "warm-prefix": "w", "max-stall-ms": 23,
        "proposer": "ngram", "draft-tokens": 24, "draft-ahead": 25, "prefill-block": 26,
        "state-dir": "s", "durability": "power", "host-tier-bytes": 27, "disk-tier-bytes": 28,
        "snapshot-tokens": 29, "hibernated-ttl-s": 30.5, "encrypt-state": "key",
        "proposer-tls-ca": "system", "proposer-tls-cert": "pc", "proposer-tls-key": "pk",
        "cluster": "homes:h:1", "cluster-secret": "f",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv("KAKEYA_" + name.upper().replace("-", "_"), str(value))
    monkeypatch.setenv("KAKEYA_API_KEY", "one two")
    monkeypatch.setenv("KAKEYA_PROPOSER_API_KEY", "three")
    monkeypatch.setenv("KAKEYA_CORS_ORIGIN", "https://a.example https://b.example")
    values["cors-origin"] = ["https://a.example", "https://b.example"]
    outcome = run("serve")
    assert outcome.settings() == values
    assert "# api-key is set by environment, and not shown" in outcome.out.splitlines()
    assert "# proposer-api-key is set by environment, and not shown" in outcome.out.splitlines()
    fields = {field.replace("_", "-") for field in ServeOptions.__dataclass_fields__}
    assert fields == set(values) | {"api-key", "proposer-api-key"}


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
        (("--draft-ahead", "-1"), "draft_ahead must be a whole number from 0"),
        (("--proposer", "remote:here"), "remote: must be HOST:PORT"),
        (("--proposer-tls-cert", "a.pem"), "proposer_tls_cert and proposer_tls_key come together"),
        (("--proposer-tls-cert", "a", "--proposer-tls-key", "b"), "needs proposer_tls_ca beside it"),
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
        (("--state-dir", "s", "--host-tier-bytes", "-1"), "host_tier_bytes must be"),
        (("--state-dir", "s", "--hibernated-ttl-s", "-1"), "hibernated_ttl_s must be"),
        (("--state-dir", "s", "--snapshot-tokens", "0"), "snapshot_tokens must be"),
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


@pytest.mark.parametrize(
    ("written", "fault"), [('{"text": ', "line 1: not a JSON object"), (None, "cannot be read")]
)
def test_prefixes_that_cannot_be_read_are_named(
    run: Run, tmp_path: Path, written: str | None, fault: str
) -> None:
    file = tmp_path / "prefixes.jsonl"
    if written is not None:
        file.write_text(written)
    outcome = run("serve", "--warm-prefix", str(file))
    assert outcome.status == 2
    assert str(file) in outcome.err.replace("\n", "")
    assert fault in " ".join(outcome.err.split())
