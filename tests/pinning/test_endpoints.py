"""Two base URLs are the same server when they differ only in what the network ignores."""

from __future__ import annotations

import pytest

from slotpin.pinning.endpoints import is_loopback, same_endpoint, server_root

HERE = "http://127.0.0.1:8080/v1"


@pytest.mark.parametrize(
    "other",
    [
        "http://127.0.0.1:8080",
        "http://127.0.0.1:8080/",
        "http://127.0.0.1:8080/v1/",
        "http://127.0.0.1:8080/v1//",
        "HTTP://127.0.0.1:8080/v1",
        "http://localhost:8080/v1",
        "http://LocalHost:8080/v1",
        "http://[::1]:8080/v1",
        "http://127.0.0.1:8080/v1?key=1",
        "http://127.0.0.1:8080/v1#part",
    ],
)
def test_the_same_server(other: str) -> None:
    assert same_endpoint(HERE, other)
    assert same_endpoint(other, HERE)


@pytest.mark.parametrize(
    "other",
    [
        "https://127.0.0.1:8080/v1",
        "http://127.0.0.1:8081/v1",
        "http://127.0.0.1/v1",
        "http://127.0.0.2:8080/v1",
        "http://gpu:8080/v1",
        "http://127.0.0.1:8080/v2",
        "http://127.0.0.1:8080/V1",
        "http://127.0.0.1:8080/v1/v1",
        "http://127.0.0.1:8080/llama/v1",
    ],
)
def test_another_server(other: str) -> None:
    assert not same_endpoint(HERE, other)
    assert not same_endpoint(other, HERE)


def test_default_ports_and_paths() -> None:
    assert same_endpoint("http://gpu/v1", "http://GPU:80")
    assert same_endpoint("https://gpu/v1", "https://gpu:443/v1/")
    assert not same_endpoint("http://gpu:443", "https://gpu:443")
    assert same_endpoint("http://gpu/llama/v1", "http://gpu/llama/")
    assert not same_endpoint("http://gpu/Llama", "http://gpu/llama")


def test_unix_sockets() -> None:
    assert same_endpoint("unix:/run/llama.sock", "unix:///run/llama.sock/v1")
    assert not same_endpoint("unix:/run/llama.sock", "unix:/run/Llama.sock")
    assert not same_endpoint("unix:/run/llama.sock", "http://localhost/run/llama.sock")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.255.0.9", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "128.0.0.1", "notlocalhost", "localhost.example", "127.0.0.1.x"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("base_url", "root"),
    [
        ("http://gpu:8080/v1", "http://gpu:8080"),
        ("http://gpu:8080/", "http://gpu:8080"),
        ("http://gpu:8080/llama/v1/?x#y", "http://gpu:8080/llama"),
        ("http://gpu:8080/v1/v1", "http://gpu:8080/v1"),
        ("unix:/run/llama.sock", "unix:/run/llama.sock"),
        ("unix:///run/llama.sock/v1", "unix:/run/llama.sock"),
    ],
)
def test_the_servers_root(base_url: str, root: str) -> None:
    assert server_root(base_url) == root
