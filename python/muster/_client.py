"""Shows the jobs of a Muster service and steers them, over its REST API."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from muster._http import Endpoint
from muster._models import Drain, Event, Exclusion, ExclusionPreview, Job, JobSummary, Task
from muster._tls import Tls
from muster.errors import MusterError, SettingsError

__all__ = ["Client"]

DEFAULT_SERVER = "http://127.0.0.1:8477"

_RECONNECT_S = 0.5

T = TypeVar("T")
Query = Mapping[str, Any]


class Client:
    """A client of a Muster service.

        client = muster.Client("http://muster-host:8477")
        for task in client.tasks():
            print(task.task, task.state, task.waits_at)

    Without arguments it finds the server as the command `muster` does: by MUSTER_SERVER (which `muster launch` sets), else
    at http://127.0.0.1:8477; with the token of MUSTER_TOKEN or MUSTER_TOKEN_FILE, and the certificates of MUSTER_CA,
    MUSTER_CERT and MUSTER_KEY. `job` may be left out everywhere if MUSTER_JOB names one, if there is only one, or if one is
    named `default`.

    Every call raises Deadline after `timeout` seconds, ServiceUnreachable if nobody answers, and Refused if the server
    refuses. A client holds no connection and may be used by many threads.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        job: str | None = None,
        token: str | None = None,
        tls: Tls | None = None,
        timeout: float = 30.0,
    ) -> None:
        if not 0 < timeout < float("inf"):
            raise SettingsError(f"timeout is {timeout}: give a number of seconds")
        url = server or os.environ.get("MUSTER_SERVER") or DEFAULT_SERVER
        self._endpoint = Endpoint.of(url, _tls_context(tls), token or _token())
        self._job = job or os.environ.get("MUSTER_JOB") or None
        self._timeout = timeout

    @property
    def url(self) -> str:
        """The address of the server."""
        return self._endpoint.url

    def __repr__(self) -> str:
        return f"<muster.Client of {self.url}>"

    def version(self) -> str:
        """Returns the version of the server."""
        return self._parse(lambda answer: str(answer["version"]), self._get("/api/v1/server"))

    def jobs(self) -> list[JobSummary]:
        """Returns all jobs, by name."""
        return list(self._pages("/api/v1/jobs", "jobs", {}, JobSummary.parse))

    def job(self, job: str | None = None) -> Job:
        """Returns a job and its present run, with all tasks."""
        return self._parse(Job.parse, self._get(self._path(job)))

    def tasks(self, job: str | None = None) -> list[Task]:
        """Returns the tasks of the present run, by number."""
        return list(self._pages(self._path(job, "tasks"), "tasks", {}, Task.parse))

    def task(self, task: int, job: str | None = None) -> Task:
        """Returns one task."""
        return self._parse(Task.parse, self._get(self._path(job, f"tasks/{int(task)}")))

    def exclusions(self, job: str | None = None, *, state: str = "in-force") -> list[Exclusion]:
        """Returns the exclusions of a job, by number: those `in-force`, `over`, or `all`."""
        return list(self._pages(self._path(job, "exclusions"), "exclusions", {"state": state}, Exclusion.parse))

    def preview_exclusion(
        self, task: int | None = None, *, host: str | None = None, reason: str = "preview", job: str | None = None
    ) -> ExclusionPreview:
        """Returns what an exclusion would do, and changes nothing."""
        body = {**_exclusion_target(task, host), "reason": reason, "dry_run": True}
        return self._parse(ExclusionPreview.parse, self._post(self._path(job, "exclusions"), body))

    def exclude(
        self,
        task: int | None = None,
        *,
        host: str | None = None,
        reason: str,
        seconds: int | None = None,
        end_run: bool = False,
        job: str | None = None,
    ) -> Exclusion:
        """Takes a task, or every task of a host (an IP address), out of the job at once.

        The others go on without it, and it is refused until `seconds` are over or `readmit()` lifts the exclusion. In a job
        whose tasks share their fate it ends the run, and is refused unless `end_run`.
        """
        body = {**_exclusion_target(task, host), "reason": reason, "end_run": end_run}
        if seconds is not None:
            body["expires_in_seconds"] = seconds
        return self._parse(Exclusion.parse, self._post(self._path(job, "exclusions"), body))

    def readmit(self, exclusion: int | Exclusion, *, reason: str, job: str | None = None) -> Exclusion:
        """Lifts an exclusion. The excluded process has ended and must be started again."""
        number = exclusion.id if isinstance(exclusion, Exclusion) else int(exclusion)
        path = self._path(job, f"exclusions/{number}")
        return self._parse(Exclusion.parse, self._request("DELETE", f"{path}?{urlencode({'reason': reason})}"))

    def drain(self, *, reason: str, in_seconds: int = 0, job: str | None = None) -> Drain:
        """Asks all tasks to agree on a step and save there, before the machines are gone in `in_seconds`."""
        body = {"reason": reason, "in_seconds": in_seconds}
        return self._parse(Drain.parse, self._post(self._path(job, "drain"), body))

    def drain_status(self, job: str | None = None) -> Drain:
        """Returns how the save of the present run stands."""
        return self._parse(Drain.parse, self._get(self._path(job, "drain")))

    def events(
        self,
        job: str | None = None,
        *,
        after: int = 0,
        newest: bool = False,
        kinds: Iterable[str] = (),
        task: int | None = None,
        limit: int = 100,
    ) -> list[Event]:
        """Returns events of a job: the first `limit` after number `after`, oldest first; or with `newest`, the latest
        `limit`, newest first (before number `after`, unless that is 0).
        """
        query = _event_query(kinds, task) | {"after": after, "newest": str(newest).lower(), "limit": limit}
        answer = self._get(f"{self._path(job, 'events')}?{urlencode(query)}")
        return self._parse(lambda page: [Event.parse(event) for event in page["events"]], answer)

    def follow(
        self,
        job: str | None = None,
        *,
        after: int | None = None,
        kinds: Iterable[str] = (),
        task: int | None = None,
        timeout: float = 3600.0,
    ) -> Iterator[Event]:
        """Yields events of a job as they happen, for `timeout` seconds.

        It begins with what happens next, or with the first event after number `after`. A lost connection is made again; if
        that does not succeed within the timeout of the client, it raises ServiceUnreachable.
        """
        path = self._path(job, "events")
        if after is None:
            # `next` of the newest page is the way back; the newest event itself is the beginning.
            latest = self._get(f"{path}?{urlencode({'newest': 'true', 'limit': 1})}")
            after = self._parse(lambda page: max((int(event["number"]) for event in page["events"]), default=0), latest)
        return self._follow(path, after, _event_query(kinds, task), time.monotonic() + timeout)

    def _follow(self, path: str, after: int, query: Query, end: float) -> Iterator[Event]:
        lost_at: float | None = None
        while (left := end - time.monotonic()) > 0:
            try:
                lines = self._endpoint.stream(f"{path}?{urlencode({**query, 'stream': 1, 'after': after})}", left, {})
            except (ConnectionError, TimeoutError):
                now = time.monotonic()
                lost_at = lost_at or now
                if now - lost_at > self._timeout:
                    raise
                time.sleep(min(_RECONNECT_S, max(end - now, 0)))
                continue
            lost_at = None
            try:
                for number, kind, data in lines:
                    if number.isdecimal():
                        after = int(number)
                    if kind != "gap":
                        yield self._parse(Event.parse, _json(data))
            finally:
                lines.close()

    def _path(self, job: str | None, rest: str = "") -> str:
        name = job or self._job or self._only_job()
        path = f"/api/v1/jobs/{quote(name, safe='')}"
        return f"{path}/{rest}" if rest else path

    def _only_job(self) -> str:
        names = [job.name for job in self.jobs()]
        if len(names) == 1 or "default" in names:
            return names[0] if len(names) == 1 else "default"
        raise SettingsError(f"which job? Name one with job=; there are: {', '.join(names) or 'none'}")

    def _pages(self, path: str, name: str, query: Query, parse: Callable[[Any], T]) -> Iterator[T]:
        after: dict[str, Any] = {}
        while True:
            page = self._get(f"{path}?{urlencode({**query, **after})}")
            yield from self._parse(lambda page: [parse(item) for item in page[name]], page)
            if page.get("next") is None:
                return
            if after.get("after") == page["next"]:
                raise MusterError(f"{self.url} answers with the same page again: update this package, or the server")
            after = {"after": page["next"]}

    def _get(self, path: str) -> Any:
        return self._request("GET", path)

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._endpoint.request(method, path, body, self._timeout)

    def _parse(self, parse: Callable[[Any], T], answer: Any) -> T:
        try:
            return parse(answer)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise MusterError(
                f"{self.url} answers in a form that this version does not know ({error!r}): use the package of the server's version"
            ) from error


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _exclusion_target(task: int | None, host: str | None) -> dict[str, Any]:
    if (task is None) == (host is None):
        raise SettingsError("exclude either a task, by its number, or a host: host='IP ADDRESS'")
    return {"task": int(task)} if task is not None else {"host": host}


def _event_query(kinds: Iterable[str], task: int | None) -> dict[str, Any]:
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    query: dict[str, Any] = {"kind": ",".join(kinds)} if kinds else {}
    return query if task is None else {**query, "task": int(task)}


def _token() -> str | None:
    path = os.environ.get("MUSTER_TOKEN_FILE")
    if not path:
        return os.environ.get("MUSTER_TOKEN", "").strip() or None
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read the token in {path}: {error}; correct MUSTER_TOKEN_FILE") from error


def _tls_context(tls: Tls | None) -> ssl.SSLContext | None:
    """Returns the context for https; None for the authorities of the system."""
    if tls is None:
        ca = os.environ.get("MUSTER_CA") or None
        cert, key = os.environ.get("MUSTER_CERT") or None, os.environ.get("MUSTER_KEY") or None
    else:
        ca, cert, key = (None if path is None else os.fspath(path) for path in (tls.ca, tls.cert, tls.key))
    if ca is None and cert is None:
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:
        raise SettingsError(f"the certificates cannot be used: {error}; check ca, cert and key") from error
    return context
