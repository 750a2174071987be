"""`live_devices()`: runs a block of code on the devices of the live processes. Either all processes keep its
effects, or none does.

This file has the agreement between the processes. `_epochs.py` keeps the state of one process. The extension
(`python/src/epoch.rs`) waits for the service and ends collectives. Begin at `live_devices`.

The protocol
------------
An *epoch* is a numbered set of members. A member is a process in one incarnation; a process that is started again
is another member. The blocks of an epoch are numbered; the number is the *round*. The members agree by keys of the
service's store that are written only once. The service applies writes one after another, so the first writer of
such a key decides, and all other members read what it wrote.

    muster/live/epoch/<n>                   the members of epoch n: written once, by whichever member is first
    muster/live/ready/<task>-<incarnation>  this process waits to become a member
    <room>/failed                           the epoch has failed: its collectives are to end
    <room>/<g>/<round>/<task>               a vote: this member has left the block, successfully or with the given error
    <room>/<g>/<round>/decision             the decision about the block: written once
    <room>/<g>/<round>/claim/<k>            which process may end the epoch

`<room>` is `muster/live/<n>-<hash of the members>`. So a process of another run or of a former epoch never writes
below the room of the present epoch.

1. *Cut.* While a process is in a block, a thread of the extension watches the epoch. If the service shows that a
   member is no longer live, or if the key `failed` exists, the thread ends the collectives of the process within
   milliseconds. It goes on until the block has ended. A member whose block raises writes the key `failed`. The
   thread does not need the GIL, so it works even if another thread holds the GIL.
2. *Vote.* At the end of its block, a member first waits for all arrays of its backend, because a computation in
   progress may still fail. Then it writes its vote. After its vote it runs no collective until the decision.
3. *Decide.* The live member with the lowest number waits until each member has voted or is lost, and writes the
   decision. The others wait for it. If this member is lost, the next one takes its place. The block is *committed*
   if every member has voted for it. The epoch *ends* if a member is lost or did not vote in time, if a process is
   ready to join, or if the block is not committed. The decision states the members of the next epoch, which
   processes were lost and why, which joined, and which blocks failed with which error.
4. *Begin again.* Before a member writes a decision that ends the epoch, it deletes the addresses of gloo. So the
   next epoch makes new connections, even between the same devices. A claim ensures that only one member does so.
   Each member that reads the decision writes the key of the next epoch, makes a new backend, and goes on. Processes
   that join wait for that key.

Invariants
----------
- *All or none.* One key decides about a block, and it is written once. A process keeps the effects of a block if
  and only if it has read a decision that commits the block. A process that is killed keeps nothing.
- *The same news everywhere.* MembershipChanged states only what the decision says, and nothing that one process
  alone observed.
- *Loss is final.* After an incarnation was lost, the service never counts it as connected again. Task states have a
  version. An epoch has the version at which its members were live, and older states say nothing about the epoch.
- *Every wait ends.* A wait for a vote ends by the vote, by the loss of the voter, or by the timeout; members that
  did not vote in time are left out. A wait for the decision ends by the decision, by the loss of its writer, or by
  the loss of the waiting process itself. A wait for the next epoch ends by that epoch, or by the loss of all
  members of the present one; in the second case the processes that are ready begin a new epoch.
- *A stuck process does not hold up the others.* If a connection breaks, gloo may forget an operation on it, and the
  block never ends. The extension then ends the process after 10 s in which it has computed nothing, and the others
  decide without it.
- *Collectives of two epochs never meet.* No member runs a collective between its vote and the next epoch, and
  gloo's addresses are deleted in between. If a stopped process wakes up in a block of a former epoch, its
  collectives are ended, it finds that the decision was made without it, and it learns that its incarnation is over.

What a process learns
---------------------
If its block is not committed, the process gets its own exception if that is the only cause, and otherwise
MembershipChanged. If its block is committed and the epoch ends, the process gets no error. Its next call then
raises MembershipChanged before the block begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from muster.errors import MusterError
from muster.jax import _internals
from muster.jax._epochs import EpochMember, LiveDevices, MembershipChanged

__all__ = ["LiveDevices", "MembershipChanged", "live_devices"]

_member: EpochMember | None = None


def current_member() -> EpochMember:
    """Returns this process as a member of epochs. There is one, because a process has one backend."""
    global _member
    state = _internals.state()
    if state.client is None:
        raise MusterError("this process has not joined a job: call muster.jax.initialize() first")
    if _member is None or _member.client is not state.client:
        _member = EpochMember()
    return _member


@contextlib.contextmanager
def live_devices(timeout: float = 600.0) -> Iterator[LiveDevices]:
    """Yields the devices of the live processes for a block of code. Either all of them keep its effects, or none does.

        while training:
            try:
                with muster.jax.live_devices() as devices:
                    new_state = step(state, devices)
            except muster.jax.MembershipChanged as change:
                state = restore(change)
            else:
                state = new_state

    All live processes of the job call it together. A process that was started again takes part after its first call, once the
    others have come to the end of their block. The job must be recoverable (`muster serve --recoverable`). The list that it
    yields also has `epoch` and `incarnations`.

    Args:
        timeout: how long to wait, in seconds, for the other processes: to begin the first block, and at the end of each one. A
            process that is lost is not waited for.

    Raises:
        MembershipChanged: the block was not committed in any process, or (`committed` is true) it was not begun, because the
            membership has changed after the block before it. The next call yields the devices that are live then.
        StaleIncarnation: the service does not count this process as live any more. End it, and start it again.
        Deadline: the other processes did not begin the first block in time, or the service did not answer in time.
    """
    member = current_member()
    if member.is_inside:
        raise MusterError("live_devices() is open already in this process, and there is one epoch at a time: leave that block first")
    devices = member.enter(timeout)
    error: BaseException | None = None
    try:
        yield devices
    except BaseException as raised:
        error = raised
    change = member.leave(error, devices, timeout)
    if change is not None:
        raise change from error
    if error is not None:
        raise error
