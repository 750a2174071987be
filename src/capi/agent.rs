//! The functions of the C library for a task: those that call the service, and those that end the task.
//!
//! They translate between C and Rust; `muster::agent` has the rules. Begin at [`AgentObject::call_until_freed`].

use std::ffi::c_char;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use muster::agent::{Agent, AgentError, ClusterRoster};
use muster::transfer::{Incarnation, MemberId, TaskId};
use tokio::sync::watch;

use super::boundary::{OutputPointer, read_array, read_text, run_interface_function};
use super::handles::{self, OpaqueHandle};
use super::returned_values::{MusterBytes, MusterEntries, MusterMember, MusterMembers};
use super::status::{CallError, MusterStatus};
use super::wait::{self, MusterCancellation, WaitLimits, timeout_error};

/// One incarnation of a task. `muster_join` makes one.
pub struct MusterAgent {
    _private: [u8; 0],
}

impl OpaqueHandle for MusterAgent {
    type Object = AgentObject;
    const NAME: &'static str = "muster_agent";
}

/// The states of an agent, from its join to its end.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MusterIdentity {
    /// The number of the task.
    pub task: u32,
    /// The number of tasks of the job.
    pub tasks: u32,
    /// The random identity of this incarnation of the task; never 0.
    pub incarnation: u64,
    /// The identity of the job's run.
    pub run: u64,
}

/// The object of a [`MusterAgent`].
pub struct AgentObject {
    /// `None` once it has left.
    agent: Mutex<Option<Arc<Agent>>>,
    /// Turns true when the handle is freed.
    freed: watch::Sender<bool>,
    identity: MusterIdentity,
}

impl AgentObject {
    pub fn new(agent: Agent) -> Self {
        let (here, tasks, run) = (agent.here(), agent.tasks(), agent.service_incarnation());
        let identity = MusterIdentity { task: here.task.0, tasks, incarnation: here.incarnation.get(), run };
        Self { agent: Mutex::new(Some(Arc::new(agent))), freed: watch::Sender::new(false), identity }
    }

    /// Returns the agent, unless it has left.
    pub fn get(&self) -> Result<Arc<Agent>, CallError> {
        let agent = self.agent.lock().unwrap_or_else(PoisonError::into_inner).clone();
        agent.ok_or_else(|| {
            let task = self.identity.task;
            let text = format!("this agent of task {task} has left its job: free it, and join again");
            CallError::new(MusterStatus::LifeEnded, text)
        })
    }

    fn take_agent(&self) -> Option<Arc<Agent>> {
        self.agent.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Runs a call of the agent, until the handle is freed.
    pub fn call_until_freed<T, E, F>(
        self: &Arc<Self>,
        limits: WaitLimits,
        work: impl FnOnce(Arc<Agent>) -> F,
    ) -> Result<T, CallError>
    where
        T: Send + 'static,
        CallError: From<E>,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let mut freed = self.freed.subscribe();
        let work = work(self.get()?);
        wait::wait(limits, async move {
            tokio::select! {
                biased;
                done = work => Ok(done?),
                // It is true, or its sender is gone: the handle was freed in either case.
                _ = freed.wait_for(|freed| *freed) => {
                    let text = "the agent was freed by another thread during this call";
                    Err(CallError::new(MusterStatus::InvalidHandle, text))
                }
            }
        })
    }
}

impl Drop for AgentObject {
    /// Ends an agent that was not freed, when the last call of it returns.
    fn drop(&mut self) {
        if let Some(agent) = self.take_agent() {
            let _unless_forked = wait::spawn(shut_down_agent(agent));
        }
    }
}

/// Ends an agent. If a call of it is still in progress on another thread, the agent ends with that call.
async fn shut_down_agent(agent: Arc<Agent>) {
    match Arc::try_unwrap(agent) {
        Ok(agent) => agent.stop_without_leaving().await,
        Err(shared) => shared.host().close_engine().await,
    }
}

fn connected_members(roster: &ClusterRoster) -> Vec<MemberId> {
    roster.lives.iter().map(|(task, incarnation)| MemberId::of_own_job(*task, *incarnation)).collect()
}

/// Ends this incarnation without telling the service, which then counts the task as lost, unless it has left. Calls of
/// other threads that wait return MUSTER_STATUS_INVALID_HANDLE. Its transfers fail; the memory of transfers is in use
/// until its release callback is called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_agent_free(agent: *mut MusterAgent) -> MusterStatus {
    run_interface_function(|| {
        wait::check_not_in_callback()?;
        let Some(object) = handles::remove(agent)? else { return Ok(()) };
        object.freed.send_replace(true);
        match object.take_agent() {
            None => Ok(()),
            Some(agent) => wait::spawn_and_wait(async move { shut_down_agent(agent).await }),
        }
    })
}

/// Writes what the agent is. It works after the end of the incarnation too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_agent_identity(
    agent: *const MusterAgent,
    identity: *mut MusterIdentity,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("identity", identity)?;
        place.set(handles::get(agent)?.identity);
        Ok(())
    })
}

/// Waits until this incarnation has ended without leaving, and returns the reason, never MUSTER_STATUS_OK: its heartbeats
/// were not answered in time, another process took its place, it was excluded, or the run ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_wait_for_end(
    agent: *const MusterAgent,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
) -> MusterStatus {
    run_interface_function(|| {
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        let time = limits.timeout;
        handles::get(agent)?.call_until_freed(limits, move |agent| async move {
            let over = tokio::time::timeout(time, agent.wait_for_end()).await;
            Err::<(), _>(over.map_or_else(|_| timeout_error(time), CallError::from))
        })
    })
}

/// Waits at a barrier until all tasks have come, or those of `tasks`, if `tasks_len` is not 0. Only one call at a time may
/// use a name. `instance` may be NULL; it becomes the number of times that this incarnation has passed the barrier before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_barrier(
    agent: *const MusterAgent,
    name: *const c_char,
    tasks: *const u32,
    tasks_len: usize,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
    instance: *mut i64,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::optional("instance", instance)?;
        // SAFETY: the caller passes a text, and an array of this length.
        let (name, members) =
            unsafe { (read_text("name", name)?.to_owned(), read_array("tasks", tasks, tasks_len)?.to_vec()) };
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        let time = limits.timeout;
        let counter = handles::get(agent)?.call_until_freed(limits, move |agent| async move {
            agent.barrier(&name, &members, time).await
        })?;
        if let Some(place) = place {
            place.set(counter);
        }
        Ok(())
    })
}

/// Waits until every live task has called this, and writes the live tasks. All get the same answer. A task that is lost
/// meanwhile is not waited for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_live_set(
    agent: *const MusterAgent,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
    members: *mut MusterMembers,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("members", members)?;
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        let time = limits.timeout;
        let found = handles::get(agent)?
            .call_until_freed(limits, move |agent| async move { agent.live_set(time).await })?;
        place.set(MusterMembers::copy(&found)?);
        Ok(())
    })
}

/// Writes a key, which must not exist unless `overwrite`. If it fails with MUSTER_STATUS_TIMED_OUT or
/// MUSTER_STATUS_INTERRUPTED, the key may have been written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_put(
    agent: *const MusterAgent,
    key: *const c_char,
    value: *const u8,
    value_len: usize,
    overwrite: bool,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
) -> MusterStatus {
    run_interface_function(|| {
        // SAFETY: the caller passes a text, and an array of this length.
        let (key, value) =
            unsafe { (read_text("key", key)?.to_owned(), read_array("value", value, value_len)?.to_vec()) };
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        handles::get(agent)?
            .call_until_freed(limits, move |agent| async move { agent.insert(&key, value, overwrite).await })
    })
}

/// Waits until a key has a value, and writes it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_get(
    agent: *const MusterAgent,
    key: *const c_char,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
    value: *mut MusterBytes,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("value", value)?;
        // SAFETY: the caller passes a text.
        let key = unsafe { read_text("key", key) }?.to_owned();
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        let time = limits.timeout;
        let found = handles::get(agent)?
            .call_until_freed(limits, move |agent| async move { agent.get(&key, time).await })?;
        place.set(MusterBytes::copy(&found)?);
        Ok(())
    })
}

/// Writes the value of a key; `data` becomes NULL if the key has none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_try_get(
    agent: *const MusterAgent,
    key: *const c_char,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
    value: *mut MusterBytes,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("value", value)?;
        // SAFETY: the caller passes a text.
        let key = unsafe { read_text("key", key) }?.to_owned();
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        let found = handles::get(agent)?
            .call_until_freed(limits, move |agent| async move { agent.try_get(&key).await })?;
        place.set(found.map_or(Ok(MusterBytes::none()), |value| MusterBytes::copy(&value))?);
        Ok(())
    })
}

/// Writes the keys below a directory with their values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_list(
    agent: *const MusterAgent,
    directory: *const c_char,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
    entries: *mut MusterEntries,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("entries", entries)?;
        // SAFETY: the caller passes a text.
        let directory = unsafe { read_text("directory", directory) }?.to_owned();
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        let found = handles::get(agent)?
            .call_until_freed(limits, move |agent| async move { agent.list(&directory).await })?;
        place.set(MusterEntries::copy(&found)?);
        Ok(())
    })
}

/// Deletes a key and all keys below it. To delete a key that does not exist succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_delete(
    agent: *const MusterAgent,
    key: *const c_char,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
) -> MusterStatus {
    run_interface_function(|| {
        // SAFETY: the caller passes a text.
        let key = unsafe { read_text("key", key) }?.to_owned();
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        handles::get(agent)?.call_until_freed(limits, move |agent| async move { agent.delete(&key).await })
    })
}

/// Writes the connected tasks, as far as this task has learned of them. It does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_connected(
    agent: *const MusterAgent,
    members: *mut MusterMembers,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("members", members)?;
        let found = connected_members(&handles::get(agent)?.get()?.roster().borrow());
        place.set(MusterMembers::copy(&found)?);
        Ok(())
    })
}

/// Waits until the connected tasks differ from `known`, in any order, and writes them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_watch(
    agent: *const MusterAgent,
    known: *const MusterMember,
    known_len: usize,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
    members: *mut MusterMembers,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("members", members)?;
        // SAFETY: the caller passes an array of this length.
        let known = unsafe { read_array("known", known, known_len) }?;
        let mut known: Vec<_> = known
            .iter()
            .map(|member| {
                Some(MemberId::of_own_job(TaskId(member.task), Incarnation::new(member.incarnation)?))
            })
            .collect::<Option<_>>()
            .ok_or_else(|| CallError::invalid_argument("known has a member with incarnation 0"))?;
        known.sort_unstable();
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        let time = limits.timeout;
        let found = handles::get(agent)?.call_until_freed(limits, move |agent| async move {
            let mut roster = agent.roster();
            let news = roster.wait_for(|roster| connected_members(roster) != known);
            tokio::select! {
                // Its own end counts before news of others.
                biased;
                error = agent.wait_for_end() => Err(CallError::from(error)),
                news = tokio::time::timeout(time, news) => match news {
                    Ok(Ok(roster)) => Ok(connected_members(&roster)),
                    _ => Err(timeout_error(time)),
                },
            }
        })?;
        place.set(MusterMembers::copy(&found)?);
        Ok(())
    })
}

/// Writes the preemption notice of the job; `data` becomes NULL if there is none. It does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_notice(agent: *const MusterAgent, notice: *mut MusterBytes) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("notice", notice)?;
        let limits = WaitLimits::new(0, std::ptr::null())?;
        let found = handles::get(agent)?.call_until_freed(limits, move |agent| async move {
            // It is known already, or it is not: the notice is followed in the background.
            Ok::<_, AgentError>(tokio::select! {
                biased;
                notice = agent.wait_for_preemption_notice() => Some(notice),
                () = std::future::ready(()) => None,
            })
        })?;
        place.set(found.map_or(Ok(MusterBytes::none()), |notice| MusterBytes::copy(notice.as_bytes()))?);
        Ok(())
    })
}

/// Asks all tasks to agree on a step and save, as JAX does at SIGTERM. Where they have been asked already, it succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_drain(
    agent: *const MusterAgent,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
) -> MusterStatus {
    run_interface_function(|| {
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        handles::get(agent)?
            .call_until_freed(limits, |agent| async move { agent.raise_preemption_notice().await })
    })
}

/// Writes whether all tasks have agreed to save before `step`. Call it before each step, with its number. It waits only
/// while the tasks agree.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_reached_sync_point(
    agent: *const MusterAgent,
    step: u64,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
    reached: *mut bool,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("reached", reached)?;
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        let time = limits.timeout;
        let found = handles::get(agent)?.call_until_freed(limits, move |agent| async move {
            let reached = tokio::time::timeout(time, agent.reached_sync_point(step)).await;
            reached.map_err(|_| timeout_error(time))?.map_err(CallError::from)
        })?;
        place.set(found);
        Ok(())
    })
}

/// Leaves the job: alone if it is recoverable, else together with all other tasks. Then the incarnation is over, and only
/// the handle remains to be freed. If it fails, this incarnation continues.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_leave(
    agent: *const MusterAgent,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
) -> MusterStatus {
    run_interface_function(|| {
        let object = handles::get(agent)?;
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        let time = limits.timeout;
        object.call_until_freed(limits, move |agent| async move { agent.try_leave(time).await })?;
        match object.take_agent() {
            None => Ok(()),
            Some(agent) => wait::spawn_and_wait(async move { shut_down_agent(agent).await }),
        }
    })
}

/// Waits until the transfer engines of these tasks are known, or of all tasks, if `tasks_len` is 0. A task publishes its
/// engine while it joins, and other tasks read it soon after. A transfer need not be preceded by this call: it waits itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_wait_for_engines(
    agent: *const MusterAgent,
    tasks: *const u32,
    tasks_len: usize,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
) -> MusterStatus {
    run_interface_function(|| {
        // SAFETY: the caller passes an array of this length.
        let tasks = unsafe { read_array("tasks", tasks, tasks_len) }?;
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        let time = limits.timeout;
        let object = handles::get(agent)?;
        let all = object.identity.tasks;
        if let Some(unknown) = tasks.iter().find(|task| **task >= all) {
            return Err(CallError::invalid_argument(format!(
                "task {unknown} does not exist among {all} task(s)"
            )));
        }
        let tasks: Vec<TaskId> = match tasks {
            [] => (0..all).map(TaskId).collect(),
            some => some.iter().copied().map(TaskId).collect(),
        };
        object.call_until_freed(limits, move |agent| async move {
            agent.host().wait_for_engines(&tasks, time).await
        })
    })
}
