//! One service under test, with the clients of a script.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use crate::script::{
    CallerSpec, Release, ScriptCall, ServiceKind, StatedServiceIncarnation, TaskStatesVersion, incarnation,
};
use crate::support::{
    Answer, Body, Call, Caller, Client, Cxx, Generation, JobOptions, MusterServer, Pending,
};

/// A service incarnation that never exists.
const NO_SERVICE: u64 = 0xDEAD_BEEF_0BAD_CAFE;

/// The time after which the service has processed an event that no answer reports.
const UNSEEN: Duration = Duration::from_millis(50);

/// A service and its clients.
pub struct ServiceUnderTest {
    pub kind: ServiceKind,
    pub generation: Generation,
    release: Release,
    service: RunningService,
    /// The lives, by task and number.
    lives: HashMap<(i32, usize), CallerLife>,
    calls: BTreeMap<String, StartedCall>,
    /// The newest service incarnation in any answer; 0 before the first.
    newest: Arc<AtomicU64>,
    /// The version of the states in the last answer to a watch.
    version: Arc<AtomicI64>,
    /// The service incarnations in the order of their appearance, to name them without their random numbers.
    runs: Vec<u64>,
}

enum RunningService {
    Cxx(Cxx),
    Muster(MusterServer),
}

/// A started call and the life that made it.
struct StartedCall {
    life: (i32, usize),
    client: Client,
    pending: Pending,
}

/// One life of a task: its connection, and the service incarnation with which it registered (0: none yet).
struct CallerLife {
    client: Client,
    service: Arc<AtomicU64>,
}

impl ServiceUnderTest {
    /// Starts the service of the jaxlib in this environment.
    pub fn cxx(environment: &Path, release: Release, job: &JobOptions) -> Self {
        Self::new(ServiceKind::Cxx, release, RunningService::Cxx(Cxx::start(environment, job)))
    }

    /// Starts a Muster that behaves like the C++ service wherever it has a choice: polls are held, and the
    /// end of a connection means nothing unless `heeds_connections`.
    pub fn muster(release: Release, job: &JobOptions, heeds_connections: bool) -> Self {
        let grace = if heeds_connections { "100ms" } else { "off" };
        let further = ["--error-delivery", "hold", "--disconnect-grace", grace, "--log", "warn"];
        Self::new(ServiceKind::Muster, release, RunningService::Muster(MusterServer::of_job(job, &further)))
    }

    fn new(kind: ServiceKind, release: Release, service: RunningService) -> Self {
        Self {
            kind,
            generation: release.generation(),
            release,
            service,
            lives: HashMap::new(),
            calls: BTreeMap::new(),
            newest: Arc::default(),
            version: Arc::new(AtomicI64::new(-1)),
            runs: Vec::new(),
        }
    }

    fn address(&self) -> SocketAddr {
        match &self.service {
            RunningService::Cxx(cxx) => cxx.address(),
            RunningService::Muster(muster) => muster.grpc,
        }
    }

    /// Returns the last lines that the service printed.
    pub fn printed_lines(&self) -> String {
        match &self.service {
            RunningService::Cxx(cxx) => cxx.said(),
            RunningService::Muster(muster) => muster.said(),
        }
    }

    /// Starts a call, and returns once the service has received it.
    pub async fn start_call(&mut self, handle: &str, who: CallerSpec, ask: &ScriptCall) {
        let call = self.concrete_call(ask);
        let caller = self.caller(who);
        let newest = Arc::clone(&self.newest);
        let version = Arc::clone(&self.version);
        let registering = matches!(call, Call::Register { .. });
        let life = self.caller_life(who);
        let own = Arc::clone(&life.service);
        let client = life.client.clone();
        let pending = client.start(caller, call, move |answer| {
            match answer.body {
                Body::Service(service) if registering => {
                    own.store(service, Ordering::SeqCst);
                    newest.store(service, Ordering::SeqCst);
                }
                Body::States { version: seen, .. } => version.store(seen, Ordering::SeqCst),
                _ => {}
            }
            if let Some(service) = answer.payloads.mismatch {
                newest.store(service, Ordering::SeqCst);
            }
        });
        wait_until_received(&client, &caller, &pending).await;
        self.calls.insert(handle.to_owned(), StartedCall { life: key_of_life(who), client, pending });
    }

    /// Returns the call with this handle.
    pub fn pending_call(&self, handle: &str) -> &Pending {
        &self.started_call(handle).pending
    }

    /// Returns all answered calls with their answers, by handle.
    pub fn answered_calls(&self) -> BTreeMap<String, Answer> {
        let answered = |(name, call): (&String, &StartedCall)| Some((name.clone(), call.pending.answer()?));
        self.calls.iter().filter_map(answered).collect()
    }

    /// Cancels a call, and returns once the service can be expected to know.
    pub async fn hang_up(&mut self, handle: &str) {
        let call = self.started_call(handle);
        call.pending.hang_up();
        call.client.ask(&Caller::new(-1, 0, 0), &Call::try_get("")).await;
        tokio::time::sleep(UNSEEN).await;
    }

    /// Closes the connection of a life, with all calls that wait on it.
    pub async fn disconnect(&mut self, who: CallerSpec) {
        let fresh = Client::new(self.generation, self.address());
        if let Some(life) = self.lives.get_mut(&key_of_life(who)) {
            life.client = fresh;
        }
        // The connection ends with the last of its owners.
        for call in self.calls.values().filter(|call| call.life == key_of_life(who)) {
            call.pending.hang_up();
        }
        self.calls.retain(|_, call| call.life != key_of_life(who));
        tokio::time::sleep(UNSEEN).await;
    }

    fn started_call(&self, handle: &str) -> &StartedCall {
        self.calls.get(handle).unwrap_or_else(|| panic!("no step starts {handle:?}"))
    }

    /// Returns the answer without the defects of the C++ service that only obscure the comparison.
    pub fn without_defects_of_cxx_service(&self, mut answer: Answer) -> Answer {
        if let Body::Alive(alive) = &mut answer.body
            && self.kind == ServiceKind::Cxx
            && !self.release.pairs_incarnations()
        {
            // The incarnations of scripts ascend with their tasks.
            let mut incarnations: Vec<_> = alive.iter().map(|(_, incarnation)| *incarnation).collect();
            incarnations.sort_unstable();
            for ((_, old), new) in alive.iter_mut().zip(incarnations) {
                *old = new;
            }
        }
        answer
    }

    /// Returns the answer without the service's random numbers, its clock and its wording.
    pub fn without_random_parts(&mut self, mut answer: Answer) -> Answer {
        answer.message.clear();
        match &mut answer.body {
            Body::Service(service) => *service = self.number_of_run(*service),
            // 0.6.2 sends a number that it sends nowhere else.
            Body::Devices { service, .. } => *service = 0,
            Body::States { version, tasks } => {
                *version = 0;
                for task in tasks {
                    task.error_message.clear();
                }
            }
            _ => {}
        }
        let payloads = &mut answer.payloads;
        if let Some(service) = &mut payloads.mismatch {
            *service = self.number_of_run(*service);
            payloads.raw.clear();
        }
        if let Some((id, _)) = &mut payloads.barrier
            && let Some((name, service)) = id.split_once("::")
            && let Ok(service) = service.parse()
        {
            *id = format!("{name}::run {}", self.number_of_run(service));
            payloads.raw.clear();
        }
        answer
    }

    /// Returns the number of a run in the order of appearance.
    fn number_of_run(&mut self, service: u64) -> u64 {
        let known = self.runs.iter().position(|run| *run == service);
        let place = known.unwrap_or_else(|| {
            self.runs.push(service);
            self.runs.len() - 1
        });
        place as u64 + 1
    }

    fn concrete_call(&self, ask: &ScriptCall) -> Call {
        match ask {
            ScriptCall::Call(call) => call.clone(),
            ScriptCall::Watch(TaskStatesVersion::None) if !self.release.can_watch_states() => Call::JobState,
            ScriptCall::Watch(version) => {
                let seen = self.version.load(Ordering::SeqCst);
                Call::watch(match version {
                    TaskStatesVersion::None => -1,
                    TaskStatesVersion::LastSeen => seen,
                    TaskStatesVersion::OneOlder => seen - 1,
                    TaskStatesVersion::Future => seen + 1000,
                })
            }
        }
    }

    fn caller(&mut self, who: CallerSpec) -> Caller {
        let own = self.caller_life(who).service.load(Ordering::SeqCst);
        let service = match who.claim {
            StatedServiceIncarnation::Registered if own != 0 => Some(own),
            // A caller that has not registered can have learnt it from others, or from the error that states
            // it.
            StatedServiceIncarnation::Registered => Some(self.newest.load(Ordering::SeqCst)),
            StatedServiceIncarnation::Wrong => Some(NO_SERVICE),
            StatedServiceIncarnation::Absent => None,
        };
        let (task, life) = key_of_life(who);
        Caller {
            task,
            incarnation: incarnation(task, life),
            service,
            named: who.named || self.release.names_jobs(),
        }
    }

    fn caller_life(&mut self, who: CallerSpec) -> &CallerLife {
        let (generation, address) = (self.generation, self.address());
        self.lives.entry(key_of_life(who)).or_insert_with(|| CallerLife {
            client: Client::new(generation, address),
            service: Arc::default(),
        })
    }
}

fn key_of_life(who: CallerSpec) -> (i32, usize) {
    (who.task, who.life.unwrap_or_default())
}

/// Returns once a call is answered, or has at least been received by the service.
///
/// Nothing acknowledges a waiting call. But the calls of one connection reach the service in their order, so
/// once later calls that never wait are answered, it has been received. The C++ service hands calls to four
/// threads: one answered call proves little there, several in a row and a moment more prove enough.
async fn wait_until_received(client: &Client, caller: &Caller, pending: &Pending) {
    for _ in 0..3 {
        if pending.answer().is_some() {
            return;
        }
        client.ask(caller, &Call::try_get("a key that nobody has")).await;
    }
    pending.within(Duration::from_millis(10)).await;
}
