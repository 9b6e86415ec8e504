"""Spans, as a collector on this machine gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from slotpin.observe.tracing import is_wanted
from tests.real.client import fetch
from tests.real.prompts import chat
from tests.support.processes import wait_until
from tests.support.program import TOP, Program

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self, url: str, sent: list[bytes]) -> None:
        self.url = url
        self.sent = sent

    @property
    def spans(self) -> list[tuple[str, Any]]:
        """Each with the name of its service."""
        found = []
        for body in self.sent:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = attributes(resource.resource)["service.name"]
                found += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return found


@contextmanager
def collector() -> Iterator[Collector]:
    sent: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            sent.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Collector(f"http://127.0.0.1:{server.server_port}", sent)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


NOBODY = "http://127.0.0.1:9/v1"


def serve(home: Path, **variables: str) -> Program:
    flags = ("--port", "0", "--enabled", "auto", "--upstream", NOBODY, "--log-format", "json")
    return Program(home, "serve", *flags, **variables)


def test_a_span_for_each_exchange_under_its_client_s(tmp_path: Path) -> None:
    with collector() as receiver, serve(tmp_path, **{ENDPOINT: receiver.url}) as program:
        traced = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        first = fetch(f"{program.url}/v1/chat/completions", chat(), traced)
        refused = fetch(f"{program.url}/compactor/v1/chat/completions", chat())
        fetch(f"{program.url}/health")  # does not generate
        program.process.terminate()
        assert program.wait() == 0
        spans = {attributes(span)["slotpin.request"]: (service, span) for service, span in receiver.spans}
        assert spans.keys() == {first.request, refused.request}
        service, span = spans[first.request]
        assert (service, span.name) == ("slotpin", "slotpin main")
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert 0 <= span.end_time_unix_nano - span.start_time_unix_nano < 60e9
        said = attributes(span)
        assert (said["slotpin.reason"], said["slotpin.outcome"]) == ("probe_failed", "unreachable")
        assert span.status.code == 2  # an error
        _, span = spans[refused.request]
        assert span.parent_span_id == b""
        assert attributes(span)["slotpin.outcome"] == "refused"
        assert span.status.code == 0
        assert len(program.events("tracing_on")) == 1


def test_the_service_can_have_another_name(tmp_path: Path) -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "",
        "OTEL_SERVICE_NAME": "laptop",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with collector() as receiver, serve(tmp_path, **{ENDPOINT: receiver.url}, **variables) as program:
        fetch(f"{program.url}/v1/chat/completions", chat())
        wait_until(lambda: bool(receiver.spans), "the span is sent while slotpin runs")
        assert [service for service, _ in receiver.spans] == ["laptop"]


def test_a_collector_that_is_not_there_does_no_harm(tmp_path: Path) -> None:
    with serve(tmp_path, **{ENDPOINT: "http://127.0.0.1:9"}) as program:
        assert fetch(f"{program.url}/v1/chat/completions", chat()).status == 502
        program.process.terminate()
        assert program.wait(20) == 0
        assert "Traceback" not in program.err


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "opentelemetry"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError")
    with serve(tmp_path, **{ENDPOINT: "http://127.0.0.1:9", "PYTHONPATH": f"{hidden.parent}:{TOP}"}) as program:
        assert fetch(f"{program.url}/v1/chat/completions", chat()).status == 502
        (event,) = program.events("tracing_off")
        assert "slotpin[otel]" in event["message"]


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({ENDPOINT: ""}, False),
        ({ENDPOINT: "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, True),
        ({ENDPOINT: "http://x", "OTEL_SDK_DISABLED": "true"}, False),
        ({ENDPOINT: "http://x", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_it_is_off_unless_an_endpoint_is_set(variables: dict[str, str], wanted: bool) -> None:
    assert is_wanted(variables) is wanted
