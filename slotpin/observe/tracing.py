"""A span for each exchange, sent to an OTLP endpoint; only where the standard variables name one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from slotpin import __version__
from slotpin.observe.log import Log
from slotpin.observe.observer import Header, Observer
from slotpin.observe.records import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

# https://opentelemetry.io/docs/specs/otel/protocol/exporter/
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# What is left unsent when slotpin ends may take so long.
_LAST_SECONDS = 3.0
_ERRORS = ("failed", "unreachable", "upstream_broke")


@contextlib.asynccontextmanager
async def tracing(observer: Observer, variables: Mapping[str, str], log: Log) -> AsyncIterator[None]:
    """Trace what `observer` hears of, if `variables` (the environment) say where to."""
    if not is_wanted(variables):
        yield
        return
    try:
        tracer = Tracer(_provider())
    except ImportError:
        log.warning("tracing_off", message="an OTLP endpoint is set; pip install 'slotpin[otel]' to send traces there")
        yield
        return
    observer.trace = tracer
    log.info("tracing_on", endpoint=next(variables[name] for name in _ENDPOINTS if variables.get(name)))
    try:
        yield
    finally:
        observer.trace = None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(tracer.close), _LAST_SECONDS)


def is_wanted(variables: Mapping[str, str]) -> bool:
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true" or variables.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(variables.get(name) for name in _ENDPOINTS)


def _provider() -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = Resource({"service.name": "slotpin", "service.version": __version__})
    provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Tracer:
    """Called with each exchange that has ended."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("slotpin", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind, self._status, self._error = SpanKind.SERVER, Status, StatusCode.ERROR

    def __call__(self, record: Record, header: Header) -> None:
        carrier = {name: value.decode("latin-1") for name in _TRACE_HEADERS if (value := header(name.encode()))}
        began = int(record.arrived * 1e9)
        span = self._tracer.start_span(
            f"slotpin {record.role}",
            self._propagator.extract(carrier),
            self._kind,
            {name: value for name, value in _attributes(record).items() if value is not None},
            start_time=began,
        )
        if record.outcome in _ERRORS:
            span.set_status(self._status(self._error, record.outcome))
        span.end(began + int(record.seconds * 1e9))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


# W3C Trace Context.
_TRACE_HEADERS = ("traceparent", "tracestate")


def _attributes(record: Record) -> dict[str, str | int | float | None]:
    """`gen_ai` and `http` are of OpenTelemetry's semantic conventions."""
    return {
        "slotpin.request": record.id,
        "slotpin.role": str(record.role),
        "slotpin.found_by": record.found_by,
        "slotpin.client": record.client,
        "slotpin.conversation": record.conversation,
        "slotpin.action": str(record.action),
        "slotpin.reason": str(record.reason),
        "slotpin.slot": record.slot,
        "slotpin.outcome": record.outcome,
        "slotpin.gate.wait_seconds": record.waited,
        "slotpin.prompt_tokens.evaluated": record.evaluated,
        "slotpin.prompt_tokens.reused": record.cached,
        "slotpin.prompt_tokens.expected": record.expected,
        "slotpin.prompt_tokens.lost": record.lost,
        "slotpin.lost_cause": str(record.cause) if record.cause is not None else None,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt,
        "gen_ai.usage.output_tokens": record.generated,
        "http.response.status_code": record.status,
    }
