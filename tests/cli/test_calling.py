"""How verbs call a server: the same flags for all, over TLS with a certificate of one's own."""

from pathlib import Path

import pytest

from kakeya.cli.calling import CallOptions
from kakeya.dialing import TLS
from kakeya.errors import ConfigError
from kakeya.serving.config import ServerConfig, TlsConfig
from support.network import Papers
from support.programs import Run
from support.serving import serving, write_model


def test_tls_is_what_the_flags_say() -> None:
    cert, key = Path("cert.pem"), Path("key.pem")
    assert CallOptions().tls() is None
    assert CallOptions(tls_ca="ca.pem").tls() == TLS("ca.pem")
    assert CallOptions(tls_ca="system", tls_cert=cert, tls_key=key).tls() == TLS(None, cert, key)
    with pytest.raises(ConfigError, match="need --tls-ca"):
        CallOptions(tls_key=key).tls()
    with pytest.raises(ConfigError, match="together"):
        CallOptions(tls_ca="system", tls_key=key).tls()


@pytest.mark.parametrize("verb", ["sessions list", "sessions close", "bridge runs", "bridge run"])
def test_every_verb_that_calls_has_the_same_flags(
    run: Run, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = run(*verb.split(), "--help").out.split()
    assert {"--api-key", "--tls-ca", "--tls-cert", "--tls-key"} <= set(said)


def test_a_server_that_wants_certificates_has_its_sessions_listed(run: Run, tmp_path: Path) -> None:
    papers = Papers.make(tmp_path)
    tls = TlsConfig(papers.server.cert, papers.server.key, papers.authority.cert)
    with serving(write_model(tmp_path / "model"), ServerConfig(bind="127.0.0.1:0", tls=tls)) as (server, _):
        call = (
            "--server",
            f"localhost:{server.address.rpartition(':')[2]}",
            "--tls-ca",
            papers.authority.cert,
        )
        own = ("--tls-cert", papers.client.cert, "--tls-key", papers.client.key)
        listed = run("sessions", "list", "--json", *map(str, (*call, *own)))
        assert (listed.status, listed.out) == (0, "[]\n"), listed.err
