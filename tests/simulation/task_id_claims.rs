//! Tests of task numbers that belong to hosts: claims, the order of new hosts, replacements, and two processes with
//! one identity.

use std::time::Duration;

use muster::coordination::{
    ClaimAnswer, ClaimRefusal, ClaimWaitReason, CommandOutcome, CommandRefusal, ConnectionEnd, ConnectionId,
    EventKind, JobSettings, OperatorCommand, ProcessIdentity, Request, RunState, SettingsChange, TaskId,
};

use crate::coordinator::{JOB, SimulatedCoordinator};
use crate::for_every_seed;

/// A process on a host, by the number of its life.
struct HostProcess {
    host: String,
    claimant: u64,
    connection: ConnectionId,
    task: Option<i32>,
}

/// Processes that ask a coordinator which task they are.
struct ClaimingFleet {
    coordinator: SimulatedCoordinator,
    next_claimant: u64,
}

impl ClaimingFleet {
    fn new(tasks: u32, recoverable: bool) -> Self {
        let mut settings = JobSettings::new(tasks);
        settings.recoverable = recoverable;
        // Processes here send no heartbeats.
        settings.heartbeat_timeout = Duration::from_secs(86_400);
        settings.register_timeout = Duration::from_secs(86_400);
        Self { coordinator: SimulatedCoordinator::new(settings, 1), next_claimant: 1 }
    }

    fn start_process(&mut self, host: &str) -> HostProcess {
        let claimant = self.next_claimant;
        self.next_claimant += 1;
        let connection = self.coordinator.connect();
        HostProcess { host: host.to_owned(), claimant, connection, task: None }
    }

    fn claim_task_id(&mut self, process: &HostProcess) -> Result<ClaimAnswer, ClaimRefusal> {
        let identity = ProcessIdentity::new(&process.host, 0).expect("an identity");
        self.coordinator.claim_task_id(identity, process.claimant, process.connection)
    }

    /// Claims and returns the task, or the name of the reason to wait.
    fn task_or_wait_reason_of_claim(&mut self, process: &mut HostProcess) -> Result<i32, &'static str> {
        match self.claim_task_id(process).expect("few claims") {
            ClaimAnswer::Granted { task, .. } => {
                process.task = Some(task.0);
                Ok(task.0)
            }
            ClaimAnswer::Pending { why, retry_after, .. } => {
                assert!(retry_after > Duration::ZERO && !why.to_string().is_empty());
                Err(why.kind())
            }
        }
    }

    /// Starts a process on each host; all ask until each has an id, and register.
    fn start_and_register_all(&mut self, hosts: &[&str]) -> Vec<HostProcess> {
        let mut processes: Vec<HostProcess> = hosts.iter().map(|host| self.start_process(host)).collect();
        for _ in 0..2 {
            for process in &mut processes {
                let _ = self.task_or_wait_reason_of_claim(process);
            }
        }
        for process in &processes {
            self.register_process(process);
        }
        processes
    }

    fn register_process(&mut self, process: &HostProcess) {
        let incarnation = self.coordinator.draw_task_incarnation();
        let task = TaskId(process.task.unwrap_or_else(|| panic!("{} has no task id", process.host)));
        self.coordinator
            .call(process.connection, Request::Register { task, incarnation, recoverable: false });
    }

    fn kill_process(&mut self, process: &HostProcess) {
        self.coordinator.close_connection(process.connection, ConnectionEnd::Reset);
    }

    fn advance_time(&mut self, time: Duration) {
        self.coordinator.advance_time(time);
    }

    fn hosts_with_task_ids(processes: &[HostProcess]) -> Vec<(&str, i32)> {
        processes.iter().map(|process| (process.host.as_str(), process.task.expect("an id"))).collect()
    }

    fn reason_of_last_assignment(&self) -> &str {
        let assigned = self
            .coordinator
            .events
            .iter()
            .rev()
            .find(|event| matches!(event.what, EventKind::TaskIdsAssigned { .. }));
        &assigned.expect("an assignment").reason
    }
}

/// Longer than a claim holds an id.
const LEASE: Duration = Duration::from_secs(11);

#[test]
fn new_hosts_are_numbered_by_their_identities_once_all_are_there() {
    let mut fleet = ClaimingFleet::new(3, false);
    let (mut c, mut a, mut b) =
        (fleet.start_process("c"), fleet.start_process("a"), fleet.start_process("b"));
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut c), Err("too-few"));
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut a), Err("too-few"));
    let Ok(ClaimAnswer::Pending { why, .. }) = fleet.claim_task_id(&c) else { panic!("too few") };
    assert_eq!(why, ClaimWaitReason::TooFew { present: 2, tasks: 3 });
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut b), Ok(1));
    assert_eq!(
        (fleet.task_or_wait_reason_of_claim(&mut a), fleet.task_or_wait_reason_of_claim(&mut c)),
        (Ok(0), Ok(2))
    );
    assert_eq!(fleet.reason_of_last_assignment(), "task 0 is a; task 1 is b; task 2 is c");
    // Asking again changes nothing.
    assert_eq!(
        (
            fleet.task_or_wait_reason_of_claim(&mut b),
            fleet.task_or_wait_reason_of_claim(&mut a),
            fleet.task_or_wait_reason_of_claim(&mut c)
        ),
        (Ok(1), Ok(0), Ok(2))
    );
    let owners = fleet.coordinator.core.job(JOB).expect("the job").task_owners(fleet.coordinator.now);
    let told: Vec<_> =
        owners.owners.iter().map(|host| (host.task.0, host.identity.host(), host.held)).collect();
    assert_eq!(told, [(0, "a", true), (1, "b", true), (2, "c", true)]);
    assert!(owners.waiting.is_empty());
    assert_eq!(owners.owners[0].address.map(|address| address.to_string()).as_deref(), Some("10.0.0.1"));
}

#[test]
fn hosts_keep_their_ids_in_the_next_run_in_whatever_order_they_come() {
    for recoverable in [false, true] {
        let mut fleet = ClaimingFleet::new(3, recoverable);
        let first = fleet.start_and_register_all(&["b", "a", "c"]);
        assert_eq!(ClaimingFleet::hosts_with_task_ids(&first), [("b", 1), ("a", 0), ("c", 2)]);
        first.iter().for_each(|process| fleet.kill_process(process));
        fleet.advance_time(LEASE);
        assert_ne!(fleet.coordinator.job_view().run.state, RunState::Running);
        let second = fleet.start_and_register_all(&["c", "b", "a"]);
        assert_eq!(
            ClaimingFleet::hosts_with_task_ids(&second),
            [("c", 2), ("b", 1), ("a", 0)],
            "recoverable: {recoverable}"
        );
        assert_eq!(fleet.coordinator.job_view().run.number.0, 2);
        assert_eq!(fleet.coordinator.job_view().run.state, RunState::Running);
    }
}

#[test]
fn a_replacement_gets_the_id_of_the_missing_host_and_not_that_of_a_late_one() {
    let mut fleet = ClaimingFleet::new(3, false);
    let first = fleet.start_and_register_all(&["a", "b", "c"]);
    first.iter().for_each(|process| fleet.kill_process(process));
    fleet.advance_time(LEASE);
    // Host b is gone; its replacement comes first of all, and would be sorted first.
    let (mut new, mut c, mut a) =
        (fleet.start_process("0"), fleet.start_process("c"), fleet.start_process("a"));
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut new), Err("too-few"));
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut c), Ok(2));
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut new), Err("too-few"));
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut a), Ok(0));
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut new), Ok(1));
    assert_eq!(fleet.reason_of_last_assignment(), "task 1 is 0 now, it was b");
    // Host b comes back after all: it is a spare.
    let mut b = fleet.start_process("b");
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut b), Err("none-free"));
    [&new, &c, &a].into_iter().for_each(|process| fleet.register_process(process));
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut b), Err("none-free"));
    assert_eq!(fleet.coordinator.job_view().run.state, RunState::Running);
}

#[test]
fn in_a_run_that_goes_on_a_spare_takes_the_id_of_a_lost_task() {
    let mut fleet = ClaimingFleet::new(3, true);
    let first = fleet.start_and_register_all(&["a", "b", "c"]);
    let mut spare = fleet.start_process("spare");
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut spare), Err("none-free"));
    fleet.kill_process(&first[1]);
    assert_eq!(
        fleet.task_or_wait_reason_of_claim(&mut spare),
        Err("none-free"),
        "the task may return within its grace"
    );
    fleet.advance_time(Duration::from_secs(1));
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut spare), Ok(1));
    fleet.register_process(&spare);
    assert_eq!(fleet.coordinator.job_view().run.live, 3);
    // A process of the host that lost its id asks again, and waits as a spare now.
    let mut b = fleet.start_process("b");
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut b), Err("none-free"));
}

#[test]
fn a_restarted_process_gets_its_id_back_in_the_same_run_once_it_counts_as_lost() {
    let mut fleet = ClaimingFleet::new(2, true);
    let first = fleet.start_and_register_all(&["a", "b"]);
    let mut again = fleet.start_process("b");
    let Ok(ClaimAnswer::Pending { why, .. }) = fleet.claim_task_id(&again) else {
        panic!("the first one lives")
    };
    let text = why.to_string();
    for words in ["another process says that it is b", "10.0.0.1", "task 1", "MUSTER_HOST_ID"] {
        assert!(text.contains(words), "{words} is not in {text}");
    }
    fleet.kill_process(&first[1]);
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut again), Err("held-by-same"));
    fleet.advance_time(Duration::from_secs(1));
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut again), Ok(1));
}

#[test]
fn of_two_processes_of_one_identity_the_second_waits() {
    let mut fleet = ClaimingFleet::new(2, false);
    let (mut one, mut other) = (fleet.start_process("same"), fleet.start_process("same"));
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut one), Err("too-few"));
    assert_eq!(
        fleet.task_or_wait_reason_of_claim(&mut other),
        Err("held-by-same"),
        "a twin counts for no second process"
    );
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut one), Err("too-few"));
    let mut third = fleet.start_process("z");
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut third), Ok(1));
    assert_eq!(
        (fleet.task_or_wait_reason_of_claim(&mut one), fleet.task_or_wait_reason_of_claim(&mut other)),
        (Ok(0), Err("held-by-same"))
    );
    // A process that died between its claim and its registration does not keep its successor out for long.
    fleet.advance_time(LEASE);
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut other), Ok(0));
}

#[test]
fn claims_that_are_not_repeated_are_dropped() {
    let mut fleet = ClaimingFleet::new(2, false);
    let (mut gone, mut here) = (fleet.start_process("a"), fleet.start_process("b"));
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut gone), Err("too-few"));
    fleet.advance_time(LEASE);
    assert_eq!(
        fleet.task_or_wait_reason_of_claim(&mut here),
        Err("too-few"),
        "a process that asked long ago is not present"
    );
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut gone), Ok(0));
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut here), Ok(1));
}

#[test]
fn waiting_claims_have_a_bound() {
    let mut fleet = ClaimingFleet::new(2, false);
    fleet.start_and_register_all(&["a", "b"]);
    for spare in 0..66 {
        let mut process = fleet.start_process(&format!("spare-{spare}"));
        assert_eq!(fleet.task_or_wait_reason_of_claim(&mut process), Err("none-free"));
    }
    let process = fleet.start_process("one-too-many");
    let refused = fleet.claim_task_id(&process);
    assert_eq!(refused, Err(ClaimRefusal::TooManyClaims { waiting: 66, tasks: 2 }));
    fleet.advance_time(LEASE);
    assert!(fleet.claim_task_id(&process).is_ok(), "those that no longer ask make room");
}

#[test]
fn an_operator_forgets_owners_and_fewer_tasks_forget_theirs() {
    let mut fleet = ClaimingFleet::new(3, false);
    let first = fleet.start_and_register_all(&["a", "b", "c"]);
    let forget = |task: Option<i32>| OperatorCommand::ForgetTaskOwners { task: task.map(TaskId) };
    assert_eq!(
        fleet.coordinator.perform_operator_command(forget(Some(1))),
        Ok(CommandOutcome::TaskOwnersForgotten(1))
    );
    let refused = fleet.coordinator.perform_operator_command(forget(Some(1)));
    assert_eq!(refused, Err(CommandRefusal::NoTaskOwner(TaskId(1))));
    // Its process goes on, and another cannot take its id.
    let mut new = fleet.start_process("new");
    assert_eq!(fleet.task_or_wait_reason_of_claim(&mut new), Err("none-free"));
    first.iter().for_each(|process| fleet.kill_process(process));
    fleet.advance_time(LEASE);
    let second = fleet.start_and_register_all(&["c", "new", "a"]);
    assert_eq!(ClaimingFleet::hosts_with_task_ids(&second), [("c", 2), ("new", 1), ("a", 0)]);
    second.iter().for_each(|process| fleet.kill_process(process));
    fleet.advance_time(LEASE);
    let change = SettingsChange { tasks: Some(2), ..SettingsChange::default() };
    fleet
        .coordinator
        .perform_operator_command(OperatorCommand::Configure(Box::new(change)))
        .expect("no run is in progress");
    fleet.coordinator.set_modeled_task_count(2);
    let third = fleet.start_and_register_all(&["c", "a"]);
    assert_eq!(ClaimingFleet::hosts_with_task_ids(&third), [("c", 1), ("a", 0)], "the id of c is no more");
    assert_eq!(
        fleet.coordinator.perform_operator_command(forget(None)),
        Ok(CommandOutcome::TaskOwnersForgotten(2))
    );
}

/// Random fleets: processes start, claim, register and die in any order. No id is given to two processes that are
/// both there, and a process that has an id keeps it.
#[test]
fn no_id_is_given_twice_in_random_fleets() {
    let granted = std::sync::atomic::AtomicU64::new(0);
    for_every_seed("no_id_is_given_twice", 4, |seed| {
        let mut rng = fastrand::Rng::with_seed(seed);
        let tasks = rng.u32(1..5);
        let mut fleet = ClaimingFleet::new(tasks, rng.bool());
        let mut processes: Vec<(HostProcess, bool)> = Vec::new();
        for _ in 0..60 {
            match rng.u8(0..10) {
                0..3 => {
                    let host = format!("h{}", rng.u32(0..tasks + 2));
                    let process = fleet.start_process(&host);
                    processes.push((process, false));
                }
                3..8 if !processes.is_empty() => {
                    let chosen = rng.usize(0..processes.len());
                    let (process, is_registered) = &mut processes[chosen];
                    if *is_registered {
                        continue;
                    }
                    if fleet.task_or_wait_reason_of_claim(process).is_ok() {
                        granted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        let task = process.task;
                        fleet.register_process(&processes[chosen].0);
                        processes[chosen].1 = true;
                        let is_twin = |(n, (other, registered)): &(usize, &(HostProcess, bool))| {
                            *n != chosen && *registered && other.task == task
                        };
                        if let Some((_, (twin, _))) = processes.iter().enumerate().find(is_twin) {
                            let host = &processes[chosen].0.host;
                            panic!("{host} and {} are both task {task:?}", twin.host);
                        }
                    }
                }
                8 if !processes.is_empty() => {
                    let (gone, _) = processes.swap_remove(rng.usize(0..processes.len()));
                    fleet.kill_process(&gone);
                    fleet.advance_time(Duration::from_secs(1));
                }
                _ => fleet.advance_time(Duration::from_secs(rng.u64(0..15))),
            }
            // A run that ended takes its processes with it.
            if !matches!(fleet.coordinator.job_view().run.state, RunState::Forming | RunState::Running) {
                for (process, _) in std::mem::take(&mut processes) {
                    fleet.kill_process(&process);
                }
            }
        }
    });
    assert!(granted.into_inner() > 0, "some fleet comes together");
}
