"""The OpenAI-shaped API over HTTP, the service routes and the web console."""

from kakeya.http_server.server import HttpServer

__all__ = ["HttpServer"]
