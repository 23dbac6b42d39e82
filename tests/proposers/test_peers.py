"""Addresses: who fits, who answers, who is the nearest, and how they are called."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kakeya.config import Calling
from kakeya.errors import ConfigError
from kakeya.proposers import peers as module
from kakeya.proposers.ngram import LookUp
from kakeya.proposers.peers import Line, Peers, Verifier
from kakeya.serving.config import ServerConfig, TlsConfig
from kakeya.serving.keys import hash_key
from kakeya.wire import distributed_pb2 as pb
from support import serving
from support.network import Papers
from support.proposing import VERIFIER, Impostor, block, desk, proposing, until


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long."""
    monkeypatch.setattr(module, "_LOOK_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(module, "_DISTRUST_SECONDS", 0.1)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_peers(stack: ExitStack, *addresses: str, verifier: Verifier = VERIFIER, **calling: object) -> Peers:
    peers = Peers(addresses, verifier, Calling(**calling))  # type: ignore[arg-type]
    stack.callback(peers.close)
    return peers


def silent() -> Impostor:
    return Impostor(lambda request: [])


def describing(**fields: object) -> Impostor:
    return Impostor(lambda request: [], pb.DescribeResponse(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"tokenizer_digest": "another"}, "its tokenizer differs from that of tiny"),
        ({"verifier_fingerprint": "other weights"}, "guesses only for a model with fingerprint other weigh"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_by_name(
    opened: ExitStack, fields: dict[str, str], words: str
) -> None:
    address = opened.enter_context(describing(**fields).listening())
    with pytest.raises(ConfigError, match=f"the proposer at {address} cannot be used: .*{words}"):
        open_peers(opened, address)


def test_whoever_fits_any_tokenizer_fits(opened: ExitStack) -> None:
    address = opened.enter_context(describing(verifier_fingerprint="tiny").listening())
    line = open_peers(opened, address).line
    assert line is not None
    assert line.address == address


def test_a_runtime_is_no_proposer(opened: ExitStack, tmp_path: Path) -> None:
    server = serving.start()
    opened.callback(lambda: serving.on_loop(server.drain(0)))
    with pytest.raises(ConfigError, match="is no `kakeya propose`"):
        open_peers(opened, server.address)


def test_a_wrong_key_is_refused_and_a_right_one_is_not(opened: ExitStack) -> None:
    config = ServerConfig(bind="127.0.0.1:0", key_hashes=(hash_key("the-key"),))
    address = opened.enter_context(proposing(desk(LookUp(4)), config))
    for key in (None, "another-key"):
        with pytest.raises(ConfigError, match="refuses our key"):
            open_peers(opened, address, api_key=key)
    assert open_peers(opened, address, api_key="the-key").line is not None
    assert "the-key" not in repr(Calling(api_key="the-key"))


def test_tls_and_certificates(opened: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    papers = Papers.make(tmp_path)
    tls = TlsConfig(papers.server.cert, papers.server.key, papers.authority.cert)
    config = ServerConfig(bind="127.0.0.1:0", tls=tls)
    port = opened.enter_context(proposing(desk(LookUp(4)), config)).rpartition(":")[2]
    mine = {"cert": str(papers.client.cert), "key": str(papers.client.key)}
    known = open_peers(opened, f"localhost:{port}", authority=str(papers.authority.cert), **mine)
    assert known.line is not None
    stranger = open_peers(opened, f"localhost:{port}", authority="system", **mine)
    assert stranger.line is None
    assert "UNAVAILABLE" in caplog.text
    with pytest.raises(ConfigError, match="cannot read the TLS file"):
        open_peers(opened, "localhost:1", authority="/no/such.pem")


def test_who_does_not_answer_is_tried_again(
    opened: ExitStack, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    port = serving.free_port()
    peers = open_peers(opened, f"127.0.0.1:{port}")
    assert peers.line is None
    assert f"the proposer at 127.0.0.1:{port} cannot be used: UNAVAILABLE" in caplog.text
    opened.enter_context(proposing(desk(LookUp(4)), ServerConfig(bind=f"127.0.0.1:{port}")))
    until(lambda: peers.line is not None)


def test_the_nearest_is_used_and_the_next_when_it_goes(opened: ExitStack, quick: None) -> None:
    far, near = silent(), silent()
    far_address = opened.enter_context(far.listening())
    going = opened.enter_context(ExitStack())
    near_address = going.enter_context(near.listening())
    far.seconds_away = 0.2
    peers = open_peers(opened, far_address, near_address)
    assert peers.line is not None
    assert peers.line.address == near_address
    going.close()
    until(lambda: peers.line is not None and peers.line.address == far_address)


def test_a_nearer_one_is_moved_to(opened: ExitStack, quick: None) -> None:
    far = silent()
    far.seconds_away, port = 0.2, serving.free_port()
    peers = open_peers(opened, opened.enter_context(far.listening()), f"127.0.0.1:{port}")
    first = peers.line
    assert first is not None
    opened.enter_context(proposing(desk(LookUp(4)), ServerConfig(bind=f"127.0.0.1:{port}")))
    until(lambda: peers.line is not first and peers.line is not None)
    assert not first.is_open


def test_one_that_becomes_another_is_left_out(
    opened: ExitStack, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    impostor = silent()
    peers = open_peers(opened, opened.enter_context(impostor.listening()))
    impostor.described = pb.DescribeResponse(tokenizer_digest="another")
    until(lambda: "its tokenizer differs" in caplog.text)
    impostor.described = pb.DescribeResponse(hidden_layers=[3])
    until(lambda: "it wants to see layers [3]" in caplog.text)
    assert peers.hidden_layers == ()


def test_a_peer_that_takes_no_messages_is_left(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peers = open_peers(opened, opened.enter_context(silent().listening()))
    line = peers.line
    assert line is not None
    monkeypatch.setattr(module, "_MOST_UNSENT", -1)
    line.send(1, open=pb.Open())
    assert not line.is_open
    assert "it takes no messages" in caplog.text
    line.send(1, open=pb.Open())  # into nothing


def test_a_stream_that_ends_is_begun_anew(opened: ExitStack, quick: None) -> None:
    impostor = silent()
    impostor.Propose = lambda requests, context: iter([block(1, 1, 1, [1])])  # type: ignore[method-assign]
    with caplog_free():
        peers = open_peers(opened, opened.enter_context(impostor.listening()))
        seen: set[Line] = set()

        def twice() -> bool:
            if peers.line is not None:
                seen.add(peers.line)
            return len(seen) > 1

        until(twice)


def caplog_free() -> ExitStack:
    """Warnings that are expected."""
    stack, log = ExitStack(), logging.getLogger("kakeya.proposers.peers")
    stack.callback(log.setLevel, log.level)
    log.setLevel(logging.CRITICAL)
    return stack


def test_peers_come_and_go_as_they_are_learnt_of(opened: ExitStack, quick: None) -> None:
    first, later = ExitStack(), opened.enter_context(silent().listening())
    address = first.enter_context(silent().listening())
    peers = open_peers(opened, address)
    assert peers.line is not None
    peers.learn([later])
    until(lambda: {peer.address for peer in peers._peers} == {address, later})  # it still answers
    peers.learn([])
    first.close()
    until(lambda: peers.line is not None and peers.line.address == later)
    until(lambda: [peer.address for peer in peers._peers] == [later])
