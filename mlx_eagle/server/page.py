"""The page at ``/``: one document that needs no other, and the headers that hold it to that.

Its parts lie in ``web/``. What runs is what lies there: the policy names the digests of script
and style, and allows connections to this server alone.
"""

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import Any

PARTS = Path(__file__).parent / "web"
SCRIPTS = ("markdown.js", "answer.js", "stream.js", "strip.js", "settings.js", "chat.js",
           "race.js", "main.js")  # fmt: skip
CONTENT_TYPE = "text/html; charset=utf-8"
TRUSTED_TYPES = "require-trusted-types-for 'script'; trusted-types 'none'"  # no text becomes HTML


def page(settings: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """The document and its headers; ``settings`` are what the page's script reads."""
    style = (PARTS / "page.css").read_text(encoding="utf-8")
    scripts = "".join((PARTS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{scripts}}})();\n'
    document = (PARTS / "page.html").read_text(encoding="utf-8")
    values = html.escape(json.dumps(settings), quote=True)
    for name, text in (("style", style), ("script", script), ("settings", values)):
        document = document.replace(f"{{{{{name}}}}}", text, 1)
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; {TRUSTED_TYPES}"
    )
    return document.encode(), {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
