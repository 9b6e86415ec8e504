"""The page: one document that asks for nothing but slotpin's own events."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from slotpin.proxy.replies import Reply


def _page() -> Reply:
    """Style and script stand in the document, and the policy allows these two texts and nothing else."""
    folder = files("slotpin.observe") / "page_files"
    style, script, document = (
        (folder / name).read_text("utf-8").strip() for name in ("page.css", "page.js", "page.html")
    )
    body = document.replace("/* page.css */", style).replace("/* page.js */", script)
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Reply(200, body.encode(), tuple((name.encode(), value.encode()) for name, value in headers.items()))


def _digest(text: str) -> str:
    """CSP Level 3, section 2.3.1."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


PAGE = _page()
