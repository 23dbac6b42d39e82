"""What `kakeya serve` says at its start: what runs, where, for whom, and in how much memory."""

import logging
from collections.abc import Iterable, Iterator

import kakeya
from kakeya.cli.console import Screen, human_bytes
from kakeya.config import NO_PROPOSER, StateConfig
from kakeya.logs import LogFormat
from kakeya.serving.config import HttpConfig, Listening, ServerConfig
from kakeya.types import Durability, RuntimeFacts, ShareBeginnings

log = logging.getLogger(__name__)

_BORDER = "!" * 78


class Notices:
    """Lines for a person, or log records where a program reads the log."""

    def __init__(self, screen: Screen, config: ServerConfig, log_format: LogFormat) -> None:
        self._screen = screen
        self._config = config
        self._for_people = log_format is LogFormat.TEXT

    def warn(self) -> None:
        """Say plainly what is dangerous about the way the server listens."""
        if self._config.exposures:
            self._warn_of(self._config)

    def _warn_of(self, listening: Listening) -> None:
        reasons = " and ".join(listening.exposures)
        warning = f"INSECURE: {listening.bind} can be reached from other machines, and {reasons}."
        if self._for_people:
            for line in (_BORDER, warning, "Use it only on a network where you trust everybody.", _BORDER):
                self._screen.notice(line, "bold red")
        else:
            log.warning(warning)

    def say(self, lines: Iterable[str]) -> None:
        """Say that it serves."""
        if self._for_people:
            for line in lines:
                self._screen.notice(line, "")
        else:
            log.info("; ".join(line.strip() for line in lines))

    def callers(self) -> str:
        """Who may call, and how."""
        tls, keys = self._config.tls, len(self._config.key_hashes)
        if self._config.front_hash is not None:
            return "the front ends of its cluster"
        wire = "plain text" if tls is None else "TLS" if tls.client_ca is None else "mutual TLS"
        return f"{wire}, {f'{keys} API keys' if keys > 1 else 'one API key' if keys else 'no API key'}"


class Banner(Notices):
    """Of `kakeya serve`."""

    def __init__(
        self,
        screen: Screen,
        config: ServerConfig,
        http: HttpConfig | None,
        log_format: LogFormat,
        state: StateConfig | None = None,
    ) -> None:
        super().__init__(screen, config, log_format)
        self._http, self._state = http, state

    def warn(self) -> None:
        """Say plainly what is dangerous about the way the servers listen."""
        super().warn()
        if self._http is not None and self._http.exposures:
            self._warn_of(self._http)

    def show(self, facts: RuntimeFacts, address: str, http_url: str | None, metrics_url: str | None) -> None:
        """Say that the servers serve."""
        self.say(self._lines(facts, address, http_url, metrics_url))

    def _lines(
        self, facts: RuntimeFacts, address: str, http_url: str | None, metrics_url: str | None
    ) -> Iterator[str]:
        yield f"kakeya {kakeya.__version__} serves {facts.model} on {address}"
        yield f"  model     {facts.family}, {facts.parameters:,} parameters, {facts.path}"
        yield (
            f"  computes  {facts.weights}; {facts.dtype}, {facts.numerics} numerics, "
            f"{facts.kernels} kernels, {facts.threads} threads"
        )
        yield (
            f"  session   {facts.session_bytes:,} bytes: sink {facts.sink} + window {facts.window:,}"
            f"{f' + recall {facts.recall:,}' if facts.recall else ''}, "
            f"{facts.bytes_per_token:,} bytes per token"
        )
        yield f"  node      at most {facts.capacity:,} sessions, {human_bytes(facts.pool_bytes)}, taken now"
        if facts.share_beginnings != ShareBeginnings.OFF:
            among = "of one owner" if facts.share_beginnings == ShareBeginnings.OWNER else "of all owners"
            kept = human_bytes(facts.prefix_cache_bytes)
            yield f"  shares    the same prefixes of sessions {among}, and {kept} of closed ones, taken now"
        if facts.recall:
            taken = human_bytes(facts.recall_bytes)
            yield f"  recalls   up to {facts.recall:,} tokens that left a window, with {taken}, taken now"
        if facts.proposer != NO_PROPOSER:
            taken = f", {human_bytes(facts.proposer_bytes)}, taken now" if facts.proposer_bytes else ""
            yield f"  drafts    up to {facts.draft_tokens} tokens where it pays, by {facts.proposer}{taken}"
        if self._state is not None:
            yield f"  keeps     {_kept(self._state)}"
        yield f"  callers   {self.callers()}"
        if http_url is not None:
            yield f"  http      {http_url}/ (console), {http_url}/v1 (OpenAI's API), {http_url}/openapi.json"
        if metrics_url is not None:
            yield f"  metrics   {metrics_url}"


def _kept(state: StateConfig) -> str:
    """Where sessions are stored, what they survive there, and how many may sleep."""
    survives = {
        Durability.NONE: "a clean end of the server",
        Durability.PROCESS: "a crash of the server",
        Durability.POWER: "a loss of power",
    }
    host, disk = human_bytes(state.host_tier_bytes), human_bytes(state.disk_tier_bytes)
    sealed = ", encrypted" if state.key_file is not None else ""
    kept = f"sessions in {state.directory}{sealed}, over {survives[state.durability]}"
    return f"{kept}; asleep at most {host} in memory and {disk} on disk"
