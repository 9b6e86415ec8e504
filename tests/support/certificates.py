"""A certificate authority of the tests' own, made with the openssl command."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def certificate_authority(folder: Path) -> Path:
    """The CA's certificate; its key stands beside it."""
    _openssl(folder, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-days", "2", "-subj", "/CN=slotpin test CA", "-addext", "keyUsage=critical,keyCertSign",
             "-keyout", "ca.key", "-out", "ca.pem")  # fmt: skip
    return folder / "ca.pem"


def server_tls(folder: Path, name: str, days: int = 2) -> ssl.SSLContext:
    """What a server uses whose certificate the CA in `folder` has given for `name`: `IP:127.0.0.1` or `DNS:host`."""
    (folder / "server.ext").write_text(f"subjectAltName={name}\n")
    _openssl(folder, "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-subj", "/CN=server", "-keyout", "server.key", "-out", "server.csr")  # fmt: skip
    _openssl(folder, "x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
             "-days", str(days), "-extfile", "server.ext", "-out", "server.pem")  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    return context
