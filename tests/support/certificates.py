"""Certificates of a test's own authority."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["certificates"]


def certificates(folder: Path) -> dict[str, str]:
    """Make an authority and a certificate that it has signed for 127.0.0.1; return the settings that name them."""
    folder.mkdir(exist_ok=True)
    authority, key, certificate, request = (
        str(folder / name) for name in ("authority", "key", "certificate", "request")
    )
    new = ["openssl", "req", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    new += ["-addext", "subjectAltName=IP:127.0.0.1"]
    sign = ["openssl", "x509", "-req", "-days", "1", "-copy_extensions", "copy", "-in", request, "-out", certificate]
    for command in (
        [*new, "-x509", "-days", "1", "-subj", "/CN=authority", "-keyout", f"{authority}.key", "-out", authority],
        [*new, "-subj", "/CN=rank", "-keyout", key, "-out", request],
        [*sign, "-CA", authority, "-CAkey", f"{authority}.key", "-CAcreateserial"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return {"tls_certificate": certificate, "tls_key": key, "tls_authority": authority}
