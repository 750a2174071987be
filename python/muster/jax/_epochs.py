"""A process as a member of epochs: it votes, reads the decisions, and carries them out. `_live.py` has the
protocol.

Begin at `EpochMember.enter` and `EpochMember.leave`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
import hashlib
import json
import time
from typing import Any

from muster import _native
from muster._requests import CHANNEL_MAX
from muster._tls import native_tls
from muster.errors import Deadline, MusterError, StaleIncarnation
from muster.jax import _internals

_ROOT = "muster/live"
_EPOCHS = f"{_ROOT}/epoch"
_READY = f"{_ROOT}/ready"
_FOUNDING = f"{_ROOT}/founding"
_GLOO = "cpu:gloo/"
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
# The service's reason for a lost task, and the cause that it means here.
_LOSSES = {"connection lost": "killed", "heartbeat timeout": "heartbeat lost", "is excluded": "excluded"}
# Where the service's advice begins.
_ADVICE = "This indicates that"
# Rounds of one directory, which is deleted as a whole.
_ROUNDS_PER_GROUP = 64
# The rooms of so many epochs are kept, for processes that wake up late.
_EPOCHS_KEPT = 8
_TEXT_MAX = 500
# The time that the service has for an answer at least, and for one that nobody needs.
_ANSWER_S = 10.0
_BRIEF_S = 2.0


class LiveDevices(list[Any]):
    """The devices of the members of an epoch, ordered by their ids."""

    epoch: int
    """The number of the epoch, which grows with each change of the membership."""
    incarnations: dict[int, int]
    """The members: processes, and the incarnation of each."""

    def __init__(self, devices: Iterable[Any], epoch: int, incarnations: Mapping[int, int]) -> None:
        super().__init__(devices)
        self.epoch = epoch
        self.incarnations = dict(incarnations)


class MembershipChanged(MusterError, *_internals.process_failure_bases()):  # type: ignore[misc]
    """The block was not committed in any process, because a process was lost or a block has failed. Do it again.

    With JAX 0.10.2 and later it is also JAX's own ProcessFailureError. All live processes of the epoch get the same one.
    """

    lost: frozenset[int]
    """The members of the epoch that are not live any more, that came back in another incarnation, or that came too late."""
    joined: frozenset[int]
    """The processes that are members of the next epoch and were not of this one, or came back in another incarnation."""
    causes: Mapping[int, str]
    """Why each lost process was lost, and where the block failed by itself: processes, and their errors."""
    committed: bool
    """Whether it came before a block began: everything before it is committed, and nothing is to be done again."""
    failed_devices: frozenset[Any]
    """The devices of the lost processes."""

    def __init__(
        self,
        lost: frozenset[int],
        joined: frozenset[int],
        causes: Mapping[int, str],
        committed: bool = False,
        failed_devices: frozenset[Any] = frozenset(),
    ) -> None:
        parts = [f"joined by {_processes_text(joined)}"] if joined else []
        parts += [
            f"{'lost' if process in lost else 'failed in'} process {process}: {cause}" for process, cause in sorted(causes.items())
        ]
        begun = "the membership has changed since the last block" if committed else "the block was not committed in any process"
        again = "Go on" if committed else "Do it again"
        RuntimeError.__init__(self, f"{begun}: {'; '.join(parts)}. {again}, with the devices of the next live_devices()")
        self.lost, self.joined, self.causes = lost, joined, dict(causes)
        self.committed, self.failed_devices = committed, failed_devices


def _processes_text(processes: Iterable[int]) -> str:
    listed = sorted(processes)
    return f"process{'es' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


@dataclass(frozen=True)
class _TaskStates:
    """The states of the tasks, as the service has sent them."""

    version: int
    live: dict[int, int]
    """The connected tasks, and their incarnations."""

    def has(self, process: int, incarnation: int, since: int) -> bool:
        """Returns whether an incarnation is live that was so at the version `since`."""
        return self.version < since or self.live.get(process) == incarnation


@dataclass(frozen=True)
class _Epoch:
    number: int
    members: dict[int, int]
    version: int
    """The version of the states by which its members are live."""

    @property
    def room(self) -> str:
        of = hashlib.sha256(repr(sorted(self.members.items())).encode()).hexdigest()[:16]
        return f"{_ROOT}/{self.number}-{of}"

    @property
    def key(self) -> str:
        return f"{_EPOCHS}/{self.number}"

    @property
    def failed(self) -> str:
        return f"{self.room}/failed"

    def group(self, number: int) -> str:
        return f"{self.room}/{number // _ROUNDS_PER_GROUP}"

    def round(self, number: int) -> str:
        return f"{self.group(number)}/{number}"

    def live(self, states: _TaskStates) -> list[int]:
        """Returns the members that are live, ascending."""
        members = sorted(self.members.items())
        return [process for process, incarnation in members if states.has(process, incarnation, self.version)]

    def encode(self) -> dict[str, Any]:
        # Incarnations have 64 bits, which not every reader of JSON keeps in a number.
        members = {str(process): str(incarnation) for process, incarnation in sorted(self.members.items())}
        return {"number": self.number, "members": members, "version": self.version}

    @classmethod
    def decode(cls, value: Any) -> _Epoch:
        members = {int(process): int(incarnation) for process, incarnation in value["members"].items()}
        return cls(value["number"], members, value["version"])


@dataclass(frozen=True)
class _Vote:
    error: str = ""
    """Empty if the block is good."""
    is_consequence: bool = False
    """Whether it failed because its collectives were ended."""

    @classmethod
    def of(cls, error: BaseException | None) -> _Vote:
        if error is None:
            return cls()
        return cls(f"{type(error).__name__}: {error}"[:_TEXT_MAX], _internals.is_ended_collective(error))

    def encode(self) -> bytes:
        return json.dumps({"error": self.error, "is_consequence": self.is_consequence}).encode()

    @classmethod
    def decode(cls, value: bytes) -> _Vote:
        read = json.loads(value)
        return cls(read["error"], read["is_consequence"])


@dataclass(frozen=True)
class _Decision:
    is_committed: bool
    lost: dict[int, str]
    """The lost members, and why."""
    failed: dict[int, str]
    """The members whose blocks have failed by themselves, and their errors."""
    joined: tuple[int, ...]
    next: _Epoch | None
    """The next epoch, if this one ends."""

    def encode(self) -> bytes:
        value = {
            "is_committed": self.is_committed,
            "lost": self.lost,
            "failed": self.failed,
            "joined": self.joined,
            "next": None if self.next is None else self.next.encode(),
        }
        return json.dumps(value).encode()

    @classmethod
    def decode(cls, value: bytes) -> _Decision:
        read = json.loads(value)
        return cls(
            read["is_committed"],
            {int(process): cause for process, cause in read["lost"].items()},
            {int(process): error for process, error in read["failed"].items()},
            tuple(read["joined"]),
            None if read["next"] is None else _Epoch.decode(read["next"]),
        )


class _RemainingTime:
    """What is left of a timeout."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.end = time.monotonic() + timeout

    def left(self) -> float:
        return max(self.end - time.monotonic(), 0.0)

    def answer(self) -> float:
        """Returns how long to wait for an answer that the service gives at once."""
        return max(self.left(), _ANSWER_S)


class EpochMember:
    """This process, as a member of one epoch after another."""

    def __init__(self) -> None:
        state = _internals.state()
        self.client = state.client
        self.me: int = state.process_id
        tls = native_tls(_internals.tls()[0])
        self.native = _native.EpochClient(state.coordinator_address, tls, _internals.collectives())
        live = self._states(_ANSWER_S).live
        if self.me not in live:
            raise self._own_loss_error(0)
        self.incarnation = live[self.me]
        self.is_inside = False
        self.epoch: _Epoch | None = None
        self.round = 0
        # How often values were exchanged in this epoch.
        self.exchanges = 0
        # A vote of which the decision is not known: the wait for it was interrupted.
        self.vote: _Vote | None = None
        # A change that the process is told before its next block.
        self.change: MembershipChanged | None = None

    def enter(self, timeout: float) -> LiveDevices:
        """Returns the devices of the present epoch, and begins a block."""
        timer = _RemainingTime(timeout)
        if self.vote is not None:
            self._resolve_interrupted_block(timer)
        if self.change is not None:
            change, self.change = self.change, None
            raise change
        epoch = self.epoch or self._join_epoch(timer)
        devices = [device for device in _internals.devices() if device.process_index in epoch.members]
        self.is_inside = True
        self.native.arm()
        return LiveDevices(sorted(devices, key=lambda device: device.id), epoch.number, epoch.members)

    def leave(self, error: BaseException | None, devices: LiveDevices, timeout: float) -> MembershipChanged | None:
        """Ends the block. Returns what to raise; None if that is `error`, or nothing."""
        assert self.epoch is not None
        # The others are told this if the block's end is interrupted.
        self.vote = _Vote.of(KeyboardInterrupt("in live_devices()"))
        try:
            if error is None:
                error = _internals.await_arrays()
            self.vote = _Vote.of(error)
            if error is not None:
                self._fail_epoch(self.vote.error)
                if isinstance(error, Exception):
                    # Nothing of this epoch may be under way when the next one begins.
                    _internals.await_arrays()
        finally:
            self.native.disarm()
            self.is_inside = False
        if error is not None and not isinstance(error, Exception):
            # An interrupt is not kept waiting. The vote is there for the others.
            with contextlib.suppress(MusterError):
                self._write_vote(self.epoch, self.vote, _BRIEF_S)
            return None
        decision = self._vote_and_follow_decision(_RemainingTime(timeout))
        lost, joined = frozenset(decision.lost), frozenset(decision.joined)
        failed_devices = frozenset(device for device in devices if device.process_index in lost)
        causes = {**decision.failed, **decision.lost}
        if decision.is_committed:
            if decision.next is not None:
                self.change = MembershipChanged(lost, joined, causes, True, failed_devices)
            return None
        if error is not None and not lost and not joined and decision.failed.keys() <= {self.me}:
            # It began here.
            return None
        change = MembershipChanged(lost, joined, causes, False, failed_devices)
        change.__cause__ = error
        return change

    def exchange(self, value: bytes, timeout: float) -> dict[int, bytes]:
        """Gives every member the values of all members, each of which calls it equally often. The caller is in a block.

        Raises:
            MusterError: a member was lost, or its block has failed.
            Deadline: not all members have called it in time.
        """
        assert self.epoch is not None and self.is_inside
        timer = _RemainingTime(timeout)
        epoch = self.epoch
        self.exchanges += 1
        directory = self.room
        self.native.insert(f"{directory}/{self.me}", value, True, timer.answer())
        failure: str | None = None
        while True:
            states = self._own_states(timer)
            entries = self.native.list_keys(directory, timer.answer())
            missing = [process for process in sorted(epoch.members) if f"{directory}/{process}" not in entries]
            if not missing:
                return {process: entries[f"{directory}/{process}"] for process in epoch.members}
            live = epoch.live(states)
            if lost := [process for process in missing if process not in live]:
                raise MusterError(f"{_processes_text(lost)} was lost before all had exchanged their values")
            if failure is not None:
                raise MusterError(f"the block has failed: {failure}")
            found = self.native.wait_for_key([f"{directory}/{missing[-1]}", epoch.failed], states.version, timer.left())
            if found is not None and found[0] == epoch.failed:
                # A member whose block fails because of the values has all of them, and they are here, too.
                failure = found[1].decode(errors="replace")

    @property
    def room(self) -> str:
        """The directory of keys of the latest exchange."""
        assert self.epoch is not None
        return f"{self.epoch.room}/exchange/{self.exchanges}"

    @property
    def channel(self) -> int:
        """A channel of the transfer engine of its own for the latest exchange, because a failed one may have left launches
        without their partners on another."""
        return int.from_bytes(hashlib.sha256(self.room.encode()).digest()[:4], "little") % CHANNEL_MAX

    # The calls of the service.

    def _states(self, timeout: float) -> _TaskStates:
        version, tasks = self.native.states(timeout)
        return _TaskStates(version, {task: incarnation for task, incarnation, is_connected, _ in tasks if is_connected})

    def _own_states(self, timer: _RemainingTime) -> _TaskStates:
        """Returns the states of the tasks; raises if this process is not live by them."""
        states = self._states(timer.answer())
        if states.live.get(self.me) != self.incarnation:
            raise self._own_loss_error(self.incarnation)
        return states

    def _own_loss_error(self, incarnation: int) -> StaleIncarnation:
        why = self.native.error_of(self.me, incarnation) or "it left, or another process took its place"
        return StaleIncarnation(
            f"the service does not count this process as live any more (process {self.me}: {why}). What it has computed since is "
            "kept nowhere. End this process, and start it again"
        )

    def _write_vote(self, epoch: _Epoch, vote: _Vote, timeout: float) -> None:
        self.native.insert(f"{epoch.round(self.round)}/{self.me}", vote.encode(), True, timeout)

    def _write_once(self, key: str, value: bytes, timer: _RemainingTime) -> bytes:
        """Writes a key, unless it exists; returns its value."""
        if self.native.insert(key, value, False, timer.answer()):
            return value
        return self.native.try_get(key, timer.answer()) or value

    def _fail_epoch(self, why: str) -> None:
        """Ends the collectives of the epoch, here and in all other members."""
        assert self.epoch is not None
        with contextlib.suppress(MusterError):
            self.native.insert(self.epoch.failed, f"task {self.me}: {why}".encode(), False, _ANSWER_S)
        self.native.cut(why)

    # Agreement.

    def _resolve_interrupted_block(self, timer: _RemainingTime) -> None:
        """Learns how the block ended whose decision was not waited for."""
        decision = self._vote_and_follow_decision(timer)
        if decision.is_committed:
            raise MusterError(
                "the block before was interrupted here while the processes agreed, and was committed: take the state from another "
                "process, or from where it was saved"
            )
        if self.change is None:
            causes = {**decision.failed, **decision.lost}
            self.change = MembershipChanged(frozenset(decision.lost), frozenset(decision.joined), causes, False)

    def _vote_and_follow_decision(self, timer: _RemainingTime) -> _Decision:
        """Votes, and returns the decision once it is made; what follows from it is done."""
        assert self.epoch is not None and self.vote is not None
        epoch = self.epoch
        self._write_vote(epoch, self.vote, timer.answer())
        decision = _Decision.decode(self._wait_for_decision(epoch, timer))
        self.vote = None
        self._carry_out_decision(epoch, decision, timer)
        return decision

    def _wait_for_decision(self, epoch: _Epoch, timer: _RemainingTime) -> bytes:
        room = epoch.round(self.round)
        decision = f"{room}/decision"
        while True:
            states = self._own_states(timer)
            live = epoch.live(states)
            keys = [decision]
            if live[:1] == [self.me]:
                entries = self.native.list_keys(room, timer.answer())
                if decision in entries:
                    return entries[decision]
                missing = [process for process in live if f"{room}/{process}" not in entries]
                if not missing:
                    return self._decide(epoch, room, entries, states, timer)
                keys.append(f"{room}/{missing[-1]}")
            try:
                found = self.native.wait_for_key(keys, states.version, timer.left())
            except Deadline:
                entries, states = self.native.list_keys(room, _ANSWER_S), self._own_states(timer)
                voters = [process for process in epoch.live(states) if f"{room}/{process}" in entries]
                if decision in entries:
                    return entries[decision]
                if voters[:1] == [self.me]:
                    return self._decide(epoch, room, entries, states, timer)
                # The one that decides came later than this process.
                timer = _RemainingTime(timer.timeout)
                continue
            if found is not None and found[0] == decision:
                return found[1]

    def _decide(self, epoch: _Epoch, room: str, entries: Mapping[str, bytes], states: _TaskStates, timer: _RemainingTime) -> bytes:
        """Decides about the block by the votes that there are. Returns the decision, which another process may have made."""
        votes = {process: _Vote.decode(entries[key]) for process in epoch.members if (key := f"{room}/{process}") in entries}
        live = epoch.live(states)
        lost = {
            process: self._loss_cause(process, incarnation, process in live, timer)
            for process, incarnation in epoch.members.items()
            if process not in live or process not in votes
        }
        bad = {process: vote for process, vote in votes.items() if vote.error}
        failed = {process: vote.error for process, vote in bad.items() if not vote.is_consequence}
        if not failed and not lost:
            failed = {process: vote.error for process, vote in bad.items()}
        is_committed = not bad and len(votes) == len(epoch.members)
        joined = self._processes_ready_to_join(epoch, states, timer)
        following: _Epoch | None = None
        if lost or joined or not is_committed:
            claimed = self._claim_epoch_change(room, f"{room}/decision", states, timer)
            if claimed is not None:
                return claimed
            members = {process: epoch.members[process] for process in live if process not in lost} | joined
            following = _Epoch(epoch.number + 1, members, states.version)
            # A member that did not come in time is in its block still.
            self.native.insert(epoch.failed, b"the epoch has ended", False, timer.answer())
            self.native.delete(_GLOO, timer.answer())
        decision = _Decision(is_committed, lost, failed, tuple(sorted(joined)), following)
        value = self._write_once(f"{room}/decision", decision.encode(), timer)
        if following is None and self.round % _ROUNDS_PER_GROUP == 0 and self.round >= 2 * _ROUNDS_PER_GROUP:
            self.native.delete(epoch.group(self.round - 2 * _ROUNDS_PER_GROUP), timer.answer())
        return value

    def _processes_ready_to_join(self, epoch: _Epoch, states: _TaskStates, timer: _RemainingTime) -> dict[int, int]:
        """Returns the live processes that wait to become members."""
        if all(epoch.members.get(process) == incarnation for process, incarnation in states.live.items()):
            return {}
        ready = self.native.list_keys(_READY, timer.answer())
        return {process: inc for process, inc in states.live.items() if f"{_READY}/{process}-{inc}" in ready}

    def _loss_cause(self, process: int, incarnation: int, is_live: bool, timer: _RemainingTime) -> str:
        """Returns why a member is lost."""
        if is_live:
            return f"late: it did not come to the end of the block within {timer.timeout:g} s"
        if error := self.native.error_of(process, incarnation):
            word = next((word for text, word in _LOSSES.items() if text in error), "failed")
            return f"{word}: {error.partition(_ADVICE)[0].strip()}"[:_TEXT_MAX]
        if self._states(timer.answer()).live.get(process) is not None:
            return "replaced: another process of this number has registered"
        if self.native.try_get(_NOTICE, timer.answer()) is not None:
            return "drained: it left the job after a preemption notice"
        return "left: it has shut down"

    def _claim_epoch_change(self, directory: str, outcome: str, states: _TaskStates, timer: _RemainingTime) -> bytes | None:
        """Makes this process the only one that ends an epoch. If another live one is that already, returns the outcome."""
        own = f"{self.me} {self.incarnation} {states.version}".encode()
        attempt = 0
        while True:
            holder = self._write_once(f"{directory}/claim/{attempt}", own, timer)
            process, incarnation, since = map(int, holder.split())
            if (process, incarnation) == (self.me, self.incarnation):
                return None
            while (states := self._own_states(timer)).has(process, incarnation, since):
                found = self.native.wait_for_key([outcome], states.version, timer.answer())
                if found is not None:
                    return found[1]
            attempt += 1

    def _carry_out_decision(self, epoch: _Epoch, decision: _Decision, timer: _RemainingTime) -> None:
        """Does what a decision says: goes on to the next round, or to the next epoch."""
        if decision.next is None:
            self.round += 1
            return
        # The newcomers wait for this key.
        following = _Epoch.decode(json.loads(self._write_once(decision.next.key, json.dumps(decision.next.encode()).encode(), timer)))
        self._begin_epoch(following)
        if following.members and min(following.members) == self.me:
            self._delete_unread_keys(following, timer)

    def _begin_epoch(self, epoch: _Epoch) -> None:
        self.native.end()
        _internals.renew_backend()
        self.round = 0
        self.exchanges = 0
        if epoch.members.get(self.me) == self.incarnation:
            self.epoch = epoch
            self.native.begin(epoch.members, epoch.version, epoch.failed, _internals.DEVICES_PER_PROCESS)
        else:
            # This process came too late. If it is live it joins again.
            self.epoch = None

    def _delete_unread_keys(self, epoch: _Epoch, timer: _RemainingTime) -> None:
        """Deletes what no process reads any more: rooms of old epochs, and what processes wrote that were lost while they joined."""
        live = self._own_states(timer).live
        waiting = {f"{_READY}/{process}-{incarnation}" for process, incarnation in live.items()}
        for key in self.native.list_keys(_READY, timer.answer()).keys() - waiting:
            self.native.delete(key, timer.answer())
        for key, value in self.native.list_keys(_EPOCHS, timer.answer()).items():
            old = _Epoch.decode(json.loads(value))
            if old.number <= epoch.number - _EPOCHS_KEPT:
                self.native.delete(old.room, timer.answer())
                self.native.delete(f"{_FOUNDING}/{old.number}", timer.answer())
                self.native.delete(key, timer.answer())

    # Joining.

    def _join_epoch(self, timer: _RemainingTime) -> _Epoch:
        """Becomes a member of an epoch: of the one after the present one, or of a new one if nobody lives in the present one."""
        try:
            epoch = self._wait_for_epoch(timer)
        except Deadline as error:
            raise Deadline(
                f"this process was not let in within {timer.timeout:g} s, because the others have not come to the end of their "
                "live_devices(), or have not begun one: `muster status` shows where they are"
            ) from error
        self._begin_epoch(epoch)
        return epoch

    def _wait_for_epoch(self, timer: _RemainingTime) -> _Epoch:
        own_key = f"{_READY}/{self.me}-{self.incarnation}"
        while True:
            states = self._own_states(timer)
            self.native.insert(own_key, b"", True, timer.answer())
            present = self._latest_epoch(timer)
            if present is not None and present.members.get(self.me) == self.incarnation:
                self.native.delete(own_key, timer.answer())
                return present
            number = 1 if present is None else present.number + 1
            keys = [f"{_EPOCHS}/{number}"]
            if present is None or not present.live(states):
                # Nobody can let it in: all that are live begin an epoch, once all have come.
                ready = self.native.list_keys(_READY, timer.answer())
                missing = [key for process, inc in sorted(states.live.items()) if (key := f"{_READY}/{process}-{inc}") not in ready]
                if not missing and min(states.live) == self.me:
                    self._begin_epoch_with_live_processes(_Epoch(number, states.live, states.version), states, timer)
                    continue
                keys += missing[-1:]
            self.native.wait_for_key(keys, states.version, timer.left())

    def _latest_epoch(self, timer: _RemainingTime) -> _Epoch | None:
        epochs = [_Epoch.decode(json.loads(value)) for value in self.native.list_keys(_EPOCHS, timer.answer()).values()]
        return max(epochs, key=lambda epoch: epoch.number, default=None)

    def _begin_epoch_with_live_processes(self, epoch: _Epoch, states: _TaskStates, timer: _RemainingTime) -> None:
        """Begins an epoch with all live processes, which are all ready."""
        if self._claim_epoch_change(f"{_FOUNDING}/{epoch.number}", epoch.key, states, timer) is None:
            self.native.delete(_GLOO, timer.answer())
            self._write_once(epoch.key, json.dumps(epoch.encode()).encode(), timer)
