"""The files with the certificates for TLS."""

from __future__ import annotations

import os
from dataclasses import dataclass

from muster.errors import SettingsError

__all__ = ["Tls", "native_tls"]


@dataclass(frozen=True)
class Tls:
    """The files with which a connection is made by TLS, in PEM."""

    ca: str | os.PathLike[str]
    """The authorities that may have issued the certificate of the service."""
    cert: str | os.PathLike[str] | None = None
    """The certificate of this client, if the service requires one."""
    key: str | os.PathLike[str] | None = None
    """Its private key."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise SettingsError("a client certificate has a private key: give both cert= and key=, or neither")


def native_tls(tls: Tls | None) -> tuple[str, str | None, str | None] | None:
    """Returns the files as the extension takes them."""
    if tls is None:
        return None
    cert, key = (None if path is None else os.fspath(path) for path in (tls.cert, tls.key))
    return os.fspath(tls.ca), cert, key
