"""Traces: one span a generate, with the GenAI names, and nothing at all when they are off."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kakeya import tracing
from kakeya.config import Quotas, RuntimeConfig
from kakeya.errors import ConfigError, InvalidArgument, ResourceExhausted, StepFailed
from kakeya.runtime import Runtime
from kakeya.types import SamplingParams
from support.tiny import PROMPT, answer, new_session

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

OpenTiny = Callable[..., Runtime]


class Traced:
    """A runtime and the spans it has finished."""

    def __init__(self, open_tiny: OpenTiny, **options: object) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")
        self.runtime = open_tiny(tracing=tracing.Tracing(self.tracer, "tiny"), **options)

    def spans(self) -> list[ReadableSpan]:
        # A read span ends on the engine thread; two calls later it has.
        for _ in range(2):
            self.runtime._engine._inbox.ask(lambda: None)
        return list(self._exporter.get_finished_spans())


def test_a_generate_is_a_span_with_the_names_of_the_convention(open_tiny: OpenTiny) -> None:
    traced = Traced(open_tiny)
    session = new_session(traced.runtime)
    sampling = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, seed=3, presence_penalty=0.25)
    answer(traced.runtime, session, 4, sampling=sampling, request_id="r1")
    (span,) = traced.spans()
    assert span.name == "text_completion tiny"
    attributes = dict(span.attributes)
    assert attributes.pop("kakeya.prefill.duration") > 0
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kakeya",
        "gen_ai.request.model": "tiny",
        "gen_ai.conversation.id": session,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7.0,
        "gen_ai.request.seed": 3,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.25,
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "kakeya.request.id": "r1",
    }
    assert span.status.status_code is StatusCode.UNSET


def test_a_second_turn_shows_what_was_cached_and_a_repeat_shows_nothing(open_tiny: OpenTiny) -> None:
    traced = Traced(open_tiny)
    session = new_session(traced.runtime)
    for request_id in ("a", "b", "b"):
        answer(traced.runtime, session, 2, sampling=SamplingParams(seed=2**64 - 1), request_id=request_id)
    first, second = traced.spans()
    assert second.attributes["gen_ai.usage.cache_read.input_tokens"] == len(PROMPT) + 1
    assert second.attributes["gen_ai.usage.input_tokens"] == len(PROMPT) + 2
    assert "gen_ai.request.seed" not in first.attributes
    assert "gen_ai.request.top_k" not in first.attributes


def test_a_cancelled_generate_ends_its_span(open_tiny: OpenTiny) -> None:
    traced = Traced(open_tiny)
    stream = traced.runtime.generate(new_session(traced.runtime), 10_000)
    stream.next_event(10)
    stream.cancel()
    list(stream)
    (span,) = traced.spans()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)


def test_errors_end_a_span_with_their_name(open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(open_tiny)
    session = new_session(traced.runtime)
    with pytest.raises(InvalidArgument):
        traced.runtime.generate(session, 0)

    def break_down(*args: object) -> None:
        raise RuntimeError("no power")

    monkeypatch.setattr(traced.runtime._engine._backend, "run", break_down)
    with pytest.raises(StepFailed):
        answer(traced.runtime, session, 3)
    refused, failed = traced.spans()
    assert refused.attributes["error.type"] == "InvalidArgument"
    assert failed.attributes["error.type"] == "StepFailed"
    assert failed.attributes["gen_ai.usage.output_tokens"] == 0
    assert refused.status.status_code is failed.status.status_code is StatusCode.ERROR


def test_a_quota_refusal_starts_no_span(open_tiny: OpenTiny) -> None:
    settings = RuntimeConfig(None, Quotas(max_concurrent_requests=1))
    traced = Traced(open_tiny, settings=settings)
    first, second = new_session(traced.runtime), new_session(traced.runtime)
    stream = traced.runtime.generate(first, 10_000)
    with pytest.raises(ResourceExhausted):
        traced.runtime.generate(second, 1)
    stream.cancel()
    list(stream)
    assert len(traced.spans()) == 1


def test_a_span_is_the_child_of_what_the_caller_is_doing(open_tiny: OpenTiny) -> None:
    traced = Traced(open_tiny)
    session = new_session(traced.runtime)
    with traced.tracer.start_as_current_span("a call") as call:
        answer(traced.runtime, session, 2)
    span = next(span for span in traced.spans() if span.name != "a call")
    assert span.parent.span_id == call.get_span_context().span_id


def test_a_tracer_that_fails_gives_the_quota_back(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = Traced(open_tiny, settings=RuntimeConfig(None, Quotas(max_concurrent_requests=1)))
    session = new_session(traced.runtime)

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no tracer")

    with monkeypatch.context() as patch:
        patch.setattr(traced.tracer, "start_span", fail)
        with pytest.raises(RuntimeError):
            traced.runtime.generate(session, 1)
    assert len(answer(traced.runtime, session, 2)) == 3


def test_without_an_endpoint_nothing_is_even_imported() -> None:
    script = (
        "import sys; from kakeya import tracing; assert tracing.from_environment('m') is None;"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    for extra in ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_SDK_DISABLED": "true"}):
        subprocess.run([sys.executable, "-c", script], env=clean | extra, check=True, timeout=60)


def test_spans_reach_the_endpoint_of_the_environment(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "a-node")
        found = tracing.from_environment("tiny")
        runtime = open_tiny(tracing=found)
        session = new_session(runtime)
        answer(runtime, session, 2)
        runtime.close()
        found.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert len(bodies) == 1
    for text in ("a-node", "gen_ai.conversation.id", session, "text_completion tiny"):
        assert text.encode() in bodies[0]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://localhost:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'kakeya\[otel\]'"):
        tracing.from_environment("tiny")
