//! Runs tasks in their own processes: each is this test's executable, started again.

use std::process::{Command, Stdio};

use muster::transfer::{DeviceId, EngineAddress, MemberId, MemberInfo, Membership, TaskId, TransportChoice};

use crate::cluster::{PATIENCE, device, member, start};
use crate::harness::process::OutputStream;
use crate::harness::{Process, Signal, test_arguments};
use crate::resharding::DEVICES_EACH;
use crate::{cancel, peer_failures};

/// A task in a process of its own.
pub struct TaskProcess {
    process: Process,
    pub here: MemberId,
    devices: Vec<DeviceId>,
    address: EngineAddress,
}

/// Returns the devices of a task that is a process of its own.
fn devices_of(task: usize, role: &str) -> Vec<DeviceId> {
    match role {
        "gather" | "gather-away" => {
            (0..DEVICES_EACH).map(|at| DeviceId(task as u32 * DEVICES_EACH + at)).collect()
        }
        _ => vec![device(task)],
    }
}

pub fn choice_of(name: &str) -> TransportChoice {
    serde_json::from_value(serde_json::Value::String(name.to_owned())).unwrap()
}

impl TaskProcess {
    /// Starts a task, whose role decides what it does (see [`child`]); in a network namespace, if one is
    /// named.
    pub fn start(task: usize, choice: &str, role: &str, network: Option<&str>) -> Self {
        Self::live(task, 0, choice, role, network)
    }

    /// Starts a certain incarnation of a task.
    pub fn live(task: usize, life: u64, choice: &str, role: &str, network: Option<&str>) -> Self {
        let exe = std::env::current_exe().unwrap();
        let mut command = match network {
            None => Command::new(exe),
            Some(name) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", name]).arg(exe);
                command
            }
        };
        command.args(test_arguments("processes::child")).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.env("MUSTER_TEST_TASK", format!("{task} {life} {choice} {role}"));
        let mut process = Process::spawn(&mut command).unwrap();
        let address = serde_json::from_str(&message(&mut process, "")).unwrap();
        Self { process, here: member(task, life), devices: devices_of(task, role), address }
    }

    pub fn peer(&self) -> (TaskId, MemberInfo) {
        let devices = self.devices.clone();
        (
            self.here.task,
            MemberInfo { incarnation: self.here.incarnation, address: self.address.clone(), devices },
        )
    }

    pub fn announce(&mut self, membership: &Membership) {
        self.tell("", membership);
    }

    /// Writes a line to the task's standard input: a word, then a value.
    pub fn tell(&mut self, word: &str, value: &impl serde::Serialize) {
        let line = format!("{word}{}", serde_json::to_string(value).unwrap());
        self.process.say(&line).expect("the child lives");
    }

    pub fn wait_for_message(&mut self, what: &str) {
        assert_eq!(self.wait_for_message_and_take_rest(what), "");
    }

    /// Waits for a message that begins with `what`. Returns the rest of it.
    pub fn wait_for_message_and_take_rest(&mut self, what: &str) -> String {
        message(&mut self.process, what)
    }

    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }
}

/// Waits for a message of a task that begins with `what`. Returns the rest of it.
fn message(process: &mut Process, what: &str) -> String {
    // The test harness of the child writes on the same line as its first message.
    let found = process.next(OutputStream::Stdout, PATIENCE, |line| {
        line.split_once("child: ").and_then(|(_, said)| said.strip_prefix(what)).map(str::to_owned)
    });
    found.unwrap_or_else(|error| panic!("the child never said {what}: {error}"))
}

/// Sends a message to the test that started this process.
pub fn send_message_to_test(what: &str) {
    println!("\nchild: {what}");
}

/// Returns the next line from the test; none when it is over.
pub fn next_line_from_test() -> Option<String> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).is_ok_and(|read| read > 0).then_some(line)
}

/// Runs the role of a task that is a process of its own.
#[test]
#[ignore = "a process of another test"]
fn child() {
    let Ok(setting) = std::env::var("MUSTER_TEST_TASK") else { return };
    let mut words = setting.split(' ');
    let mut word = || words.next().unwrap().to_owned();
    let (task, life, choice, role) = (word().parse().unwrap(), word().parse().unwrap(), word(), word());
    let engine = start(task, life, |config| {
        config.transport = choice_of(&choice);
        config.devices = devices_of(task, &role);
        if role.ends_with("away") {
            config.listen = Some("10.77.0.2:0".parse().unwrap());
        }
        if role == "fire" {
            (config.reactors, config.copiers, config.lanes) = (1, 1, 2);
        }
    });
    send_message_to_test(&serde_json::to_string(engine.address()).unwrap());
    let membership: Membership = serde_json::from_str(&next_line_from_test().unwrap()).unwrap();
    engine.on_membership(membership.clone());
    match role.as_str() {
        "meet" => peer_failures::send_to_every_task(&engine, &membership),
        "gather" | "gather-away" => peer_failures::gather_all(&engine),
        "fire" => cancel::run_cancelling_task(&engine),
        _ => peer_failures::exchange_while_peer_lives(&engine, task, role == "late"),
    }
}
