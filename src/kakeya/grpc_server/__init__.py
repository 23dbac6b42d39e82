"""RuntimeService over gRPC: messages in, events out, errors to status codes."""

from kakeya.grpc_server.server import Server

__all__ = ["Server"]
