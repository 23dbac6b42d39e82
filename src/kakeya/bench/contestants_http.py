"""Asking a server as its clients do: post JSON over HTTP, read the events of the answer as they come."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from kakeya.errors import RemoteError

# A turn that hangs is an error in the end.
TIMEOUT_S = 600.0
_TOO_MANY_REQUESTS = 429


class Refused(RemoteError):
    """The server will not do this, however often it is asked: a status from 400 to 499."""


def events(
    address: str, path: str, body: dict[str, Any], timeout: float = TIMEOUT_S
) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer, each as it arrives, over a connection of their own.

    Raises Refused when the server refuses the request, and RemoteError when it cannot be reached, answers
    with another status or breaks off. Blocks; meant for a thread.
    """
    connection = HTTPConnection(address, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            _check(path, answer)
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))
    except (OSError, HTTPException, ValueError) as error:
        raise RemoteError(f"POST {path} broke off: {error!r}") from error
    finally:
        connection.close()


def fetched(address: str, path: str, timeout: float = 10.0) -> dict[str, Any]:
    """A JSON object by GET. Raises RemoteError when there is none."""
    connection = HTTPConnection(address, timeout=timeout)
    try:
        connection.request("GET", path)
        with connection.getresponse() as answer:
            _check(path, answer)
            return dict(json.loads(answer.read()))
    except (OSError, HTTPException, ValueError) as error:
        raise RemoteError(f"GET {path} broke off: {error!r}") from error
    finally:
        connection.close()


def _check(path: str, answer: HTTPResponse) -> None:
    """Raise Refused or RemoteError unless the status is that of success."""
    if answer.status == 200:
        return
    text = f"{path} was answered {answer.status}: {_message(answer.read(10_000).decode('utf-8', 'replace'))}"
    refused = 400 <= answer.status < 500 and answer.status != _TOO_MANY_REQUESTS
    raise Refused(text) if refused else RemoteError(text)


def _message(said: str) -> str:
    """What an OpenAI-shaped error says; all that was said where it is of another shape."""
    try:
        return str(json.loads(said)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return said.strip()[:500]
