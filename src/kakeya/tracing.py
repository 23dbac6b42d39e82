"""Optional OpenTelemetry traces: one span for each generate, with the GenAI attribute names.

Nothing of OpenTelemetry is imported until `from_environment` or `Tracing` is asked for it; a runtime
without tracing pays nothing. Spans carry counts and settings, never the contents of a history.
"""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kakeya.errors import ConfigError
from kakeya.types import DoneEvent, FailedEvent, SamplingParams, StopReason

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_OPERATION = "text_completion"
_FINISH_REASONS = {
    StopReason.EOS: "stop",
    StopReason.MAX_TOKENS: "length",
    StopReason.TRUNCATED: "length",
    StopReason.CANCELLED: "cancelled",
}


def from_environment(model: str) -> "Tracing | None":
    """Traces to where the standard OTEL_* variables point; None when they name no endpoint.

    Raises ConfigError when they do and the packages of the extra `otel` are missing.
    """
    wanted = any(os.environ.get(name) for name in _ENDPOINTS)
    if not wanted or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"an OpenTelemetry endpoint is set, but {error.name} is not installed: pip install 'kakeya[otel]'"
        ) from error
    service = os.environ.get("OTEL_SERVICE_NAME", "kakeya")
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider.get_tracer("kakeya"), model, provider.shutdown)


class Tracing:
    """Makes the spans of one model's generates with an OpenTelemetry tracer."""

    def __init__(self, tracer: "Tracer", model: str, shutdown: Callable[[], None] | None = None) -> None:
        self._tracer = tracer
        self._model = model
        self._shutdown = shutdown

    def close(self) -> None:
        """Send what is left. Without this call it is sent when the process exits."""
        if self._shutdown is not None:
            self._shutdown()

    def generate(
        self, session_id: str, request_id: str, max_tokens: int, sampling: SamplingParams
    ) -> "GenerateSpan":
        """Begin the span of a generate, as a child of what the caller's context holds."""
        attributes: dict[str, str | int | float] = {
            "gen_ai.operation.name": _OPERATION,
            "gen_ai.provider.name": "kakeya",
            "gen_ai.request.model": self._model,
            "gen_ai.conversation.id": session_id,
            "gen_ai.request.max_tokens": max_tokens,
            **_sampling_attributes(sampling),
        }
        if request_id:
            attributes["kakeya.request.id"] = request_id
        return GenerateSpan(self._tracer.start_span(f"{_OPERATION} {self._model}", attributes=attributes))


class GenerateSpan:
    """The span of one generate, ended exactly once, from any thread."""

    def __init__(self, span: "Span") -> None:
        self._span = span

    def end(self, terminal: DoneEvent | FailedEvent, prompt_tokens: int, output_tokens: int) -> None:
        """The generate is over: what it used, and why it ended."""
        self._span.set_attribute("gen_ai.usage.input_tokens", prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", output_tokens)
        if isinstance(terminal, FailedEvent):
            self.refused(terminal.error)
            return
        self._span.set_attribute("gen_ai.response.finish_reasons", [_FINISH_REASONS[terminal.stop_reason]])
        self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", terminal.cached_token_count)
        self._span.set_attribute("kakeya.prefill.duration", terminal.prefill_duration_seconds)
        self._span.end()

    def refused(self, error: BaseException) -> None:
        """The generate ended by an error, or never began."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()


def _sampling_attributes(sampling: SamplingParams) -> Mapping[str, int | float]:
    attributes: dict[str, int | float] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    # Attributes are signed 64-bit numbers; a seed is unsigned.
    if sampling.seed < 2**63:
        attributes["gen_ai.request.seed"] = sampling.seed
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = float(sampling.top_k)
    return attributes
