"""Makes HTTP requests, one at a time. Each has a deadline for the whole request. Redirects are not followed, and
proxies are not used.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from muster.errors import Deadline, MusterError, Refused, ServiceUnreachable, SettingsError

__all__ = ["Endpoint", "Lines"]

_ANSWER_BYTES_MAX = 1 << 28
_LINE_BYTES_MAX = 1 << 20
_CHUNK_BYTES = 1 << 16
_SILENCE_S = 60.0

# The advice for each type of problem.
_NEXT = {
    "ends-run": "look first with preview_exclusion(); pass end_run=True if the run shall end",
    "already-excluded": "exclusions() shows all; readmit() lifts one",
    "no-such-exclusion": "exclusions() shows those in force",
    "already-over": "exclusions() shows those in force",
    "no-such-task": "tasks() shows the tasks",
    "not-running": "job() shows how the run stands",
    "drain-under-way": "drain_status() shows how it stands",
    "no-token": "give token=, or set MUSTER_TOKEN or MUSTER_TOKEN_FILE",
    "bad-token": "`muster token new` makes tokens",
}


class _DeadlineSocket:
    """A socket whose every wait ends at one deadline."""

    def __init__(self, stream: socket.socket, deadline: float) -> None:
        self.stream = stream
        self.deadline = deadline

    def wait(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.stream.settimeout(left)

    def sendall(self, data: bytes) -> None:
        self.wait()
        self.stream.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self), _CHUNK_BYTES)

    def close(self) -> None:
        """http.client calls it before it has read the answer: `end()` closes."""

    def end(self) -> None:
        self.stream.close()


class _DeadlineReader(io.RawIOBase):
    def __init__(self, source: _DeadlineSocket) -> None:
        super().__init__()
        self.source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.source.wait()
        return self.source.stream.recv_into(buffer)


@dataclass(frozen=True)
class Endpoint:
    """The HTTP port of a server, and how to authenticate there."""

    url: str
    host: str
    port: int
    tls: ssl.SSLContext | None
    token: str | None

    @classmethod
    def of(cls, url: str, tls: ssl.SSLContext | None, token: str | None) -> Endpoint:
        """Returns the endpoint of a URL such as http://localhost:8477."""
        wrong = f"{url!r} is no server: give its HTTP address, such as http://127.0.0.1:8477"
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise SettingsError(wrong) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
            raise SettingsError(wrong)
        secure = parts.scheme == "https"
        if token is not None and not (token.isascii() and token.isprintable()):
            raise SettingsError("the token has characters that no token has: check MUSTER_TOKEN, or the token file")
        port = port or (443 if secure else 80)
        shown = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        context = (tls or ssl.create_default_context()) if secure else None
        return cls(f"{parts.scheme}://{shown}:{port}", parts.hostname, port, context, token)

    def _connect(self, deadline: float) -> tuple[http.client.HTTPConnection, _DeadlineSocket]:
        stream = socket.create_connection((self.host, self.port), max(deadline - time.monotonic(), 0.001))
        try:
            stream.settimeout(max(deadline - time.monotonic(), 0.001))
            if self.tls is not None:
                stream = self.tls.wrap_socket(stream, server_hostname=self.host)
        except BaseException:
            stream.close()
            raise
        guarded = _DeadlineSocket(stream, deadline)
        connection = http.client.HTTPConnection(self.host, self.port)
        connection.sock = guarded  # what http.client uses of a socket
        return connection, guarded

    def _send(
        self, method: str, path: str, body: bytes | None, accept: str, timeout: float, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, _DeadlineSocket]:
        connection, guarded = self._connect(time.monotonic() + timeout)
        try:
            sent = {"accept": accept, "connection": "close", "user-agent": "muster-python", **headers}
            if self.token is not None:
                sent["authorization"] = f"Bearer {self.token}"
            if body is not None:
                sent["content-type"] = "application/json"
            connection.request(method, path, body=body, headers=sent)
            return connection.getresponse(), guarded
        except BaseException:
            guarded.end()
            raise

    def request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        """Sends a request and returns the answer's JSON; None if it is empty."""
        data = None if body is None else json.dumps(body).encode()
        try:
            answer, guarded = self._send(method, path, data, "application/json", timeout, {})
            try:
                text = _read(answer)
            finally:
                guarded.end()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error, timeout) from error
        return self._parse(answer.status, path, text)

    def stream(self, path: str, timeout: float, headers: Mapping[str, str]) -> Lines:
        """Opens a stream of server-sent events, which ends after `timeout`."""
        try:
            answer, guarded = self._send("GET", path, None, "text/event-stream", timeout, headers)
            if answer.status != 200:
                try:
                    self._parse(answer.status, path, _read(answer))
                finally:
                    guarded.end()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error, timeout) from error
        return Lines(answer, guarded)

    def _unreachable(self, error: Exception, timeout: float) -> MusterError:
        if isinstance(error, TimeoutError):
            return Deadline(
                f"no answer from {self.url} within {timeout:g} s: check that this is the HTTP address that `muster serve` "
                "printed and that the network lets this host reach it, or pass a longer timeout"
            )
        return ServiceUnreachable(
            f"cannot reach a server at {self.url}: {error}; check that `muster serve` runs, and that this is its HTTP address "
            "(8477 unless told otherwise), not its gRPC one: give server=, or set MUSTER_SERVER",
            self.url,
        )

    def _parse(self, status: int, path: str, text: bytes) -> Any:
        try:
            answer = json.loads(text) if text else None
        except (ValueError, RecursionError):
            raise MusterError(
                f"what answers at {self.url} is not a Muster (status {status}): give the HTTP address that `muster serve` printed"
            ) from None
        if status < 400:
            return answer
        problem: Mapping[str, Any] = answer if isinstance(answer, dict) else {}
        kind = str(problem.get("type", status)).removeprefix("/problems/")
        text_of = f"{self.url} answers {problem.get('title', status)}: {problem.get('detail', path)}"
        raise Refused(f"{text_of}; {_NEXT[kind]}" if kind in _NEXT else text_of, kind)


def _read(answer: http.client.HTTPResponse) -> bytes:
    parts, size = [], 0
    while part := answer.read(_CHUNK_BYTES):
        parts.append(part)
        size += len(part)
        if size > _ANSWER_BYTES_MAX:
            raise http.client.HTTPException(f"the answer has more than {_ANSWER_BYTES_MAX} bytes")
    return b"".join(parts)


class Lines:
    """The events of a stream, as (id, kind, data)."""

    def __init__(self, answer: http.client.HTTPResponse, guarded: _DeadlineSocket) -> None:
        self._answer = answer
        self._guarded = guarded
        self._end = guarded.deadline

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        """Yields each event. Ends when the stream ends or is silent, when the connection breaks, or when the time is over."""
        fields: dict[str, str] = {}
        while True:
            # The server says every 15 s that it is alive.
            self._guarded.deadline = min(self._end, time.monotonic() + _SILENCE_S)
            try:
                line = self._answer.readline(_LINE_BYTES_MAX)
            except (OSError, http.client.HTTPException, ValueError):
                return
            if not line.endswith(b"\n"):
                return
            text = line.decode(errors="replace").rstrip("\r\n")
            if text:
                name, _, value = text.partition(":")
                fields[name] = value.removeprefix(" ")
            elif fields:
                if "data" in fields:
                    yield fields.get("id", ""), fields.get("event", ""), fields["data"]
                fields = {}

    def close(self) -> None:
        """Closes the connection."""
        self._guarded.end()
