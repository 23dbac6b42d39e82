"""Values of settings, checked: what is wrong is named, with what would be right."""

from enum import StrEnum

from kakeya.errors import ConfigError


def check_count(name: str, value: object, least: int = 1, most: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, got {value!r}")


def check_choice(name: str, value: object, choices: type[StrEnum]) -> None:
    if not isinstance(value, choices):
        right = ", ".join(f"{choices.__name__}.{each.name}" for each in choices)
        raise ConfigError(f"{name} must be one of {right}, got {value!r}")


def check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a number of seconds above 0, got {value!r}")


def check_seconds_from(name: str, value: object, least: float) -> None:
    # gRPC counts milliseconds in 32 bits.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= 1e6:
        raise ConfigError(f"{name} must be a number of seconds from {least:g} to 1,000,000, got {value!r}")


def host_and_port(bind: str, name: str = "bind") -> tuple[str, int]:
    host, colon, port = bind.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not bracketed):
        raise ConfigError(f"{name} must be HOST:PORT such as 127.0.0.1:50051 or [::1]:50051, got {bind!r}")
    return host.strip("[]"), int(port)
