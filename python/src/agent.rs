//! The native worker for Python: one incarnation of a task, without JAX.
//!
//! [`Agent`] has the calls of `muster::agent::Agent`; `transfer.rs` has its transfer engine. Rust threads send the
//! heartbeats. So a task does not miss its heartbeats while Python threads compute for long or hold the GIL. Begin at
//! [`Agent::join`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use muster::agent::{Agent as NativeAgent, AgentConfig, AgentError, ClusterRoster};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::cluster_env::{TlsPaths, detect_cluster_env, own_process_identity, tls_files};
use super::errors::{agent_error, new_exception};
use super::transfer::{Engine, NetworkOptions, apply_network};
use super::wait::{parse_timeout_seconds, runtime, wait};

/// The time that the service has for an answer after the limit that it applies itself.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// One incarnation of a task.
#[pyclass(frozen, module = "muster._native")]
pub struct Agent {
    /// `None` once it has left.
    agent: Mutex<Option<Arc<NativeAgent>>>,
    task: u32,
    tasks: u32,
    incarnation: u64,
    run: u64,
}

/// A task and its incarnation.
type Member = (u32, u64);

fn incarnations_by_task(roster: &ClusterRoster) -> BTreeMap<u32, u64> {
    roster.lives.iter().map(|(task, incarnation)| (task.0, incarnation.get())).collect()
}

impl Agent {
    fn get(&self, py: Python<'_>) -> PyResult<Arc<NativeAgent>> {
        let agent = self.agent.lock().unwrap_or_else(PoisonError::into_inner).clone();
        agent.ok_or_else(|| {
            let text =
                format!("this Agent of task {} has left its job: join again with a new one", self.task);
            new_exception(py, "StaleIncarnation", &text, &[])
        })
    }

    fn take(&self) -> Option<Arc<NativeAgent>> {
        self.agent.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Runs a call of the agent.
    fn call<T, F>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(Arc<NativeAgent>) -> F + Send + 'static,
    ) -> PyResult<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, AgentError>> + Send + 'static,
    {
        let agent = self.get(py)?;
        wait(py, work(agent))?.map_err(|error| agent_error(py, &error))
    }
}

#[pymethods]
impl Agent {
    /// Registers a new incarnation of a task, and waits until the service counts it as connected.
    #[staticmethod]
    #[pyo3(signature = (service, num_processes, process_id, *, timeout, heartbeat_timeout, tls, network))]
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of a Python function")]
    fn join(
        py: Python<'_>,
        service: Option<String>,
        num_processes: Option<u32>,
        process_id: Option<u32>,
        timeout: f64,
        heartbeat_timeout: f64,
        tls: Option<TlsPaths>,
        network: NetworkOptions,
    ) -> PyResult<Self> {
        let place = detect_cluster_env(py, service, num_processes, process_id)?;
        let mut config = AgentConfig {
            tasks: place.tasks.map(|tasks| tasks.value),
            register_limit: parse_timeout_seconds(py, "timeout", timeout)?,
            heartbeat_timeout: parse_timeout_seconds(py, "heartbeat_timeout", heartbeat_timeout)?,
            tls: tls_files(tls),
            identity: own_process_identity(),
            ..AgentConfig::new(place.service.value, place.task.value)
        };
        apply_network(py, &mut config, network)?;
        let joined = wait(py, async move {
            let agent = NativeAgent::join(config).await?;
            // The states of the tasks are here, and the roster is made of them in a moment.
            let (here, mut roster) = (agent.here().task, agent.roster());
            let known = roster.wait_for(|roster| roster.lives.contains_key(&here));
            let _in_time = tokio::time::timeout(ANSWER_TIME, known).await;
            Ok::<_, AgentError>(agent)
        })?;
        let agent = joined.map_err(|error| agent_error(py, &error))?;
        let here = agent.here();
        Ok(Self {
            task: here.task.0,
            tasks: agent.tasks(),
            incarnation: here.incarnation.get(),
            run: agent.service_incarnation(),
            agent: Mutex::new(Some(Arc::new(agent))),
        })
    }

    /// Whether it has left or ended.
    #[getter]
    fn has_ended(&self) -> bool {
        self.agent.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    #[getter]
    fn process_id(&self) -> u32 {
        self.task
    }

    #[getter]
    fn num_processes(&self) -> u32 {
        self.tasks
    }

    #[getter]
    fn incarnation(&self) -> u64 {
        self.incarnation
    }

    #[getter(run)]
    fn service_incarnation(&self) -> u64 {
        self.run
    }

    /// Returns the transfer engine of this incarnation.
    fn engine(&self, py: Python<'_>) -> PyResult<Engine> {
        Ok(Engine::of_agent(self.get(py)?.host()))
    }

    /// Waits at a barrier, and returns the number of the instance.
    #[pyo3(signature = (name, timeout, process_ids = None))]
    fn barrier(
        &self,
        py: Python<'_>,
        name: String,
        timeout: f64,
        process_ids: Option<Vec<u32>>,
    ) -> PyResult<i64> {
        let limit = parse_timeout_seconds(py, "timeout", timeout)?;
        let members = process_ids.unwrap_or_default();
        self.call(py, move |agent| async move { agent.barrier(&name, &members, limit).await })
    }

    /// Returns the live tasks, once every one of them has called.
    fn live_set(&self, py: Python<'_>, timeout: f64) -> PyResult<Vec<Member>> {
        let limit = parse_timeout_seconds(py, "timeout", timeout)?;
        let members = self.call(py, move |agent| async move { agent.live_set(limit).await })?;
        Ok(members.into_iter().map(|member| (member.task.0, member.incarnation.get())).collect())
    }

    #[pyo3(signature = (key, value, *, overwrite))]
    fn put(&self, py: Python<'_>, key: String, value: &Bound<'_, PyBytes>, overwrite: bool) -> PyResult<()> {
        let value = value.as_bytes().to_vec();
        self.call(py, move |agent| async move { agent.insert(&key, value, overwrite).await })
    }

    fn get_value(&self, py: Python<'_>, key: String, timeout: f64) -> PyResult<Py<PyBytes>> {
        let limit = parse_timeout_seconds(py, "timeout", timeout)?;
        let value = self.call(py, move |agent| async move {
            // While the service is away the call is repeated, so the limit of one attempt is not enough.
            let over = |_| AgentError::TimedOut { call: "get", limit };
            tokio::time::timeout(limit, agent.get(&key, limit + ANSWER_TIME)).await.map_err(over)?
        })?;
        Ok(PyBytes::new(py, &value).unbind())
    }

    fn try_get(&self, py: Python<'_>, key: String) -> PyResult<Option<Py<PyBytes>>> {
        let value = self.call(py, move |agent| async move { agent.try_get(&key).await })?;
        Ok(value.map(|value| PyBytes::new(py, &value).unbind()))
    }

    fn list_keys(&self, py: Python<'_>, directory: String) -> PyResult<Vec<(String, Py<PyBytes>)>> {
        let entries = self.call(py, move |agent| async move { agent.list(&directory).await })?;
        Ok(entries.into_iter().map(|(key, value)| (key, PyBytes::new(py, &value).unbind())).collect())
    }

    fn delete(&self, py: Python<'_>, key: String) -> PyResult<()> {
        self.call(py, move |agent| async move { agent.delete(&key).await })
    }

    /// Returns the connected tasks and their incarnations, as far as this task has learned of them.
    fn connected(&self, py: Python<'_>) -> PyResult<BTreeMap<u32, u64>> {
        Ok(incarnations_by_task(&self.get(py)?.roster().borrow()))
    }

    /// Returns the connected tasks once they differ from `known`.
    fn watch(&self, py: Python<'_>, known: BTreeMap<u32, u64>, timeout: f64) -> PyResult<BTreeMap<u32, u64>> {
        let limit = parse_timeout_seconds(py, "timeout", timeout)?;
        self.call(py, move |agent| async move {
            let mut roster = agent.roster();
            let news = roster.wait_for(|roster| incarnations_by_task(roster) != known);
            tokio::select! {
                // Its own end counts before news of others.
                biased;
                error = agent.wait_for_end() => Err(error),
                news = tokio::time::timeout(limit, news) => match news {
                    Ok(Ok(roster)) => Ok(incarnations_by_task(&roster)),
                    _ => Err(AgentError::TimedOut { call: "watch of tasks", limit }),
                },
            }
        })
    }

    /// Returns the text of the preemption notice, if there is one.
    #[pyo3(name = "notice")]
    fn preemption_notice(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let agent = self.get(py)?;
        wait(py, async move {
            // It is known already, or it is not: the notice is followed in the background.
            tokio::select! {
                biased;
                notice = agent.wait_for_preemption_notice() => Some(notice),
                () = std::future::ready(()) => None,
            }
        })
    }

    #[pyo3(name = "drain")]
    fn raise_preemption_notice(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |agent| async move { agent.raise_preemption_notice().await })
    }

    fn reached_sync_point(&self, py: Python<'_>, step: u64, timeout: f64) -> PyResult<bool> {
        let limit = parse_timeout_seconds(py, "timeout", timeout)?;
        self.call(py, move |agent| async move {
            let over = |_| AgentError::TimedOut { call: "agreement on a step", limit };
            tokio::time::timeout(limit, agent.reached_sync_point(step)).await.map_err(over)?
        })
    }

    /// Leaves in good order. If the service does not let it leave in time, this incarnation continues.
    fn leave(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let limit = parse_timeout_seconds(py, "timeout", timeout)?;
        self.call(py, move |agent| async move { agent.try_leave(limit).await })?;
        self.stop_without_leaving(py)
    }

    /// Ends without telling the service, which then counts the task as lost.
    #[pyo3(name = "end")]
    fn stop_without_leaving(&self, py: Python<'_>) -> PyResult<()> {
        // A forked process keeps it: its end would join threads that exist only in the parent.
        runtime(py)?;
        let Some(agent) = self.take() else { return Ok(()) };
        wait(py, async move {
            // Another thread may be in a call of it; the agent then ends with that call.
            if let Some(agent) = Arc::into_inner(agent) {
                agent.stop_without_leaving().await;
            }
        })
    }

    fn __repr__(&self) -> String {
        format!(
            "<muster.Agent process {} of {}, incarnation {:016x}>",
            self.task, self.tasks, self.incarnation
        )
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let Some(agent) = self.take() else { return };
        match Python::attach(runtime) {
            // The end of the engine joins threads: not on a thread that holds the GIL.
            Ok(runtime) => _ = runtime.spawn_blocking(move || drop(agent)),
            // A forked process has none of the threads that it would join.
            Err(_) => std::mem::forget(agent),
        }
    }
}
