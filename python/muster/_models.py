"""The answers of the REST API, as frozen dataclasses.

Each class has the fields that programs use. Its field `raw` has the whole answer. The server describes every field
at `/api/v1/openapi.json`. If a server does not send a field, the field has its default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

__all__ = [
    "Drain",
    "Event",
    "Exclusion",
    "ExclusionPreview",
    "FirstCause",
    "Job",
    "JobSummary",
    "Run",
    "Task",
]

Json = Mapping[str, Any]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _time(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)


def _time_or_none(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else _time(microseconds)


def _raw() -> Any:
    return field(repr=False, compare=False, hash=False)


@dataclass(frozen=True)
class FirstCause:
    """The first error of a run."""

    at: datetime
    task: int | None
    """The task that it came from, where one is known."""
    why: str
    """The error in short."""
    error: str
    """The error as the tasks receive it."""

    @classmethod
    def parse(cls, answer: Json) -> FirstCause:
        return cls(_time(answer["at"]), answer.get("task"), answer.get("why", ""), answer["error"])


def _first_cause(answer: Json | None) -> FirstCause | None:
    return None if answer is None else FirstCause.parse(answer)


@dataclass(frozen=True)
class JobSummary:
    """A job in the list of jobs."""

    name: str
    tasks: int
    recoverable: bool
    """Whether its tasks may fail and return."""
    run: int
    """The number of its present run."""
    state: str
    """forming, running, completed, failed or abandoned."""
    live: int
    """How many tasks are connected and not excluded."""
    first_cause: FirstCause | None
    raw: Json = _raw()

    @classmethod
    def parse(cls, answer: Json) -> JobSummary:
        return cls(
            answer["name"],
            answer["tasks"],
            answer["recoverable"],
            answer["run"],
            answer["state"],
            answer["live"],
            _first_cause(answer.get("first_cause")),
            answer,
        )


@dataclass(frozen=True)
class Task:
    """One task of the present run."""

    task: int
    state: str
    """missing, registering, connected, suspect, disconnected or failed; or excluded, whichever of these it is."""
    since: datetime
    """Since when it is in that state."""
    incarnation: str | None
    """The identity of its present or last life, in hexadecimal."""
    address: str | None
    """The address from which it registered."""
    last_heartbeat: datetime | None
    waits_at: tuple[str, ...]
    """The barriers at which it waits."""
    unsynced: bool
    """Whether it returned in this run and has not passed a barrier with all members since."""
    why: str | None
    """Its error in short."""
    error: str | None
    """Its error as clients receive it."""
    raw: Json = _raw()

    @classmethod
    def parse(cls, answer: Json) -> Task:
        life: Json = next(iter(answer["lives"]), {})
        return cls(
            answer["task"],
            "excluded" if answer.get("excluded") is not None else answer["standing"],
            _time(answer["since"]),
            life.get("incarnation"),
            life.get("peer"),
            _time_or_none(answer.get("last_heartbeat")),
            tuple(answer.get("waits_at", ())),
            answer.get("unsynced", False),
            answer.get("why"),
            answer.get("error"),
            answer,
        )


@dataclass(frozen=True)
class Run:
    """The present run of a job."""

    number: int
    incarnation: str
    state: str
    """forming, running, completed, failed or abandoned."""
    opened_at: datetime
    started_at: datetime | None
    """When every task had registered."""
    ended_at: datetime | None
    end_reason: str | None
    live: int
    """How many tasks are connected and not excluded."""
    first_cause: FirstCause | None
    tasks: tuple[Task, ...]
    raw: Json = _raw()

    @classmethod
    def parse(cls, answer: Json) -> Run:
        return cls(
            answer["number"],
            answer["incarnation"],
            answer["state"],
            _time(answer["opened_at"]),
            _time_or_none(answer.get("started_at")),
            _time_or_none(answer.get("ended_at")),
            answer.get("end_reason"),
            answer["live"],
            _first_cause(answer.get("first_cause")),
            tuple(Task.parse(task) for task in answer["tasks"]),
            answer,
        )


@dataclass(frozen=True)
class Exclusion:
    """The decision that a task or a host takes no part."""

    id: int
    task: int | None
    host: str | None
    """The IP address of the excluded host, if it is no single task."""
    tasks: tuple[int, ...]
    """The tasks of the present run that it keeps out."""
    by: str
    """Who made it."""
    reason: str
    since: datetime
    expires_at: datetime | None
    """When it expires; None: when somebody lifts it."""
    in_force: bool
    raw: Json = _raw()

    @classmethod
    def parse(cls, answer: Json) -> Exclusion:
        return cls(
            answer["id"],
            answer.get("task"),
            answer.get("host"),
            tuple(answer["tasks"]),
            answer["actor"]["who"],
            answer["reason"],
            _time(answer["since"]),
            _time_or_none(answer.get("expires_at")),
            answer.get("ended") is None,
            answer,
        )


@dataclass(frozen=True)
class ExclusionPreview:
    """What an exclusion would do."""

    tasks: tuple[int, ...]
    """The tasks that it would remove from the present run."""
    live: tuple[int, ...]
    """The live set that would remain."""
    ends_run: str | None
    """The outcome of the run, if it would end it."""
    raw: Json = _raw()

    @classmethod
    def parse(cls, answer: Json) -> ExclusionPreview:
        return cls(tuple(answer["tasks"]), tuple(answer["live"]), answer.get("ends_run"), answer)


@dataclass(frozen=True)
class Drain:
    """How a coordinated save stands."""

    run: int
    state: str
    """The state of the run: after its end no step will be agreed on."""
    notice: str | None
    """The notice; None if nobody asked for a save."""
    waiting_for: tuple[int, ...]
    """The tasks that the agreement on a step waits for."""
    agreed_step: int | None
    """The step at which all tasks save, once they have agreed."""
    failed: bool
    """Whether they have not agreed and will not."""
    raw: Json = _raw()

    @classmethod
    def parse(cls, answer: Json) -> Drain:
        save: Json = answer.get("preemption") or {}
        return cls(
            answer["run"],
            answer.get("state", "running"),
            save.get("notice"),
            tuple(answer["waiting_for"]),
            save.get("agreed_step"),
            save.get("failed", False),
            answer,
        )


@dataclass(frozen=True)
class Event:
    """A change of state."""

    number: int
    """Its number among all events of the server: what `after=` takes."""
    at: datetime
    job: str
    run: int
    kind: str
    """Such as task-connected, task-failed, barrier-passed, excluded."""
    task: int | None
    """The task that it is about, if it is about one."""
    reason: str
    raw: Json = _raw()

    @classmethod
    def parse(cls, answer: Json) -> Event:
        return cls(
            answer["number"],
            _time(answer["at"]),
            answer["job"],
            answer["run"],
            answer["kind"],
            answer.get("task"),
            answer["reason"],
            answer,
        )


@dataclass(frozen=True)
class Job:
    """A job and its present run."""

    name: str
    tasks: int
    recoverable: bool
    """Whether its tasks may fail and return."""
    settings: Json
    """Its settings, by the names of the REST API."""
    run: Run
    history: Sequence[Json]
    """The runs before, newest first."""
    exclusions: tuple[Exclusion, ...]
    """The exclusions in force."""
    raw: Json = _raw()

    @classmethod
    def parse(cls, answer: Json) -> Job:
        settings = answer["settings"]
        return cls(
            answer["name"],
            settings["tasks"],
            settings["recoverable"],
            settings,
            Run.parse(answer["run"]),
            answer["history"],
            tuple(Exclusion.parse(exclusion) for exclusion in answer.get("exclusions", ())),
            answer,
        )
