"""The settings by which the transfer engines of other hosts reach the engine of this process."""

from __future__ import annotations

import os
from dataclasses import dataclass

from muster._tls import Tls, native_tls

__all__ = ["Network", "native_network"]


@dataclass(frozen=True)
class Network:
    """How other hosts reach the transfer engine of this process. Without a Network, only processes of this host reach it.

    An engine that other hosts can reach needs to know who they are: by a secret that all processes of the job share, or by
    certificates.
    """

    listen: str = "127.0.0.1:0"
    """IP:PORT to listen on; port 0 is any free one."""
    advertise: tuple[str, ...] = ()
    """IP:PORT that other hosts connect to, if it is another one: with `listen="0.0.0.0:9000"`, the address of this host."""
    token_file: str | os.PathLike[str] | None = None
    """A file with the secret: MUSTER_TRANSFER_TOKEN_FILE if it is left out. `head -c 32 /dev/urandom | base64` makes one."""
    tls: Tls | None = None
    """Certificates, with which transfers between hosts are encrypted: authorities, and this engine's own."""
    insecure: bool = False
    """Whether every process that reaches the address may connect: for networks that are trusted."""


_Native = tuple[str, list[str], str | None, tuple[str, str | None, str | None] | None, bool]


def native_network(network: Network | None) -> _Native:
    """Returns the options in the form that the extension takes."""
    chosen = network or Network()
    token_file = chosen.token_file or os.environ.get("MUSTER_TRANSFER_TOKEN_FILE") or None
    token = None if token_file is None else os.fspath(token_file)
    return chosen.listen, list(chosen.advertise), token, native_tls(chosen.tls), chosen.insecure
