//! A program that writes down what each call answers. The answers of the simulated driver are kept in `answers.txt`; those
//! of a real one are compared with them on a machine that has one.
//!
//! All lines are those of a real driver (580.159 with an H200), except those that begin with `~`: there the simulation differs
//! from it, and its entry point says why, or no real driver was asked yet (`cuMemcpy2DAsync`). No line is about an unknown handle or freed memory, which a real driver may not survive.

mod calls;
mod mapped;
mod shared;

use std::fmt::Debug;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use cudarc::driver::sys;
use simulated_gpu::SimulatedGpu;

use crate::isolation::PeerProcess;
use crate::skip::{Lacking, skip};

pub use shared::import;

/// The kept answers.
const KEPT: &str = include_str!("answers.txt");
/// Tells the processes of the program to use the system's driver.
const REAL: &str = "SIMULATED_GPU_REAL";

/// The answers so far.
#[derive(Default)]
pub struct Answers {
    text: String,
}

impl Answers {
    fn section(&mut self, name: &str) {
        self.text += &format!("\n# {name}\n");
    }

    /// Notes an answer that every driver gives.
    fn note(&mut self, call: &str, answer: impl Debug) {
        self.text += &format!("{call}: {answer:?}\n");
    }

    /// Notes an answer in which a real driver differs, or that is not known of one.
    fn note_open(&mut self, call: &str, answer: impl Debug) {
        self.text += &format!("~ {call}: {answer:?}\n");
    }
}

fn is_real() -> bool {
    std::env::var_os(REAL).is_some()
}

/// Loads the driver that the process is to use; returns whether there is one.
fn load() -> bool {
    if !is_real() {
        SimulatedGpu::load();
        return true;
    }
    // SAFETY: the library is loaded and called without a device.
    unsafe { sys::is_culib_present() && sys::cuInit(0) == crate::driver::OK }
}

/// The program, as a peer process: it writes its answers to the socket.
pub fn run(mut socket: UnixStream) {
    let text = if load() {
        let mut answers = Answers::default();
        calls::before_initialization(&mut answers, is_real());
        calls::devices_and_contexts(&mut answers);
        calls::streams(&mut answers);
        calls::events(&mut answers);
        calls::memory(&mut answers);
        calls::host_memory(&mut answers);
        calls::copies(&mut answers);
        calls::values(&mut answers);
        shared::handles(&mut answers);
        mapped::mappings(&mut answers);
        answers.text
    } else {
        "absent".to_owned()
    };
    socket.write_all(text.as_bytes()).unwrap();
}

/// Runs the program on one of the drivers.
fn answers(is_real: bool) -> String {
    let mut peer = PeerProcess::start_with("conformance", |command| {
        command.env("SIMULATED_GPU", "memory=64M");
        if is_real { command.env(REAL, "1") } else { command.env_remove(REAL) }
    });
    let mut text = String::new();
    peer.socket.read_to_string(&mut text).unwrap();
    assert!(peer.wait().success(), "the program failed after {text:?}");
    text
}

/// Returns the lines in which two runs differ.
fn differences(kept: &str, found: &str, with_open: bool) -> Vec<String> {
    // A line belongs to its section: others have calls of the same name.
    let lines = |text: &str| -> Vec<String> {
        let mut section = "";
        let mut all = Vec::new();
        let is_wanted = |line: &&str| !line.is_empty() && (with_open || !line.starts_with('~'));
        for line in text.lines().filter(is_wanted) {
            section = line.strip_prefix("# ").unwrap_or(section);
            all.push(format!("{section}: {line}"));
        }
        all
    };
    let (kept, found) = (lines(kept), lines(found));
    let mut all: Vec<_> =
        kept.iter().filter(|line| !found.contains(line)).map(|line| format!("- {line}")).collect();
    all.extend(found.iter().filter(|line| !kept.contains(line)).map(|line| format!("+ {line}")));
    all
}

#[test]
fn the_simulated_driver_answers_as_it_did() {
    let found = answers(false);
    let differences = differences(KEPT, &found, true);
    assert!(
        differences.is_empty() && found.trim() == KEPT.trim(),
        "{}\nall:\n{found}",
        differences.join("\n")
    );
    assert_eq!(answers(false), found, "every run gives the same answers");
}

#[test]
fn a_real_driver_answers_as_the_simulated_one() {
    let found = answers(true);
    if found == "absent" {
        return skip(Lacking::Hardware("GPU"));
    }
    // Those of the open lines are shown with --nocapture, to confirm or correct them.
    println!("{}", differences(KEPT, &found, true).join("\n"));
    let differences = differences(KEPT, &found, false);
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn differences_are_found() {
    let [kept, found] = ["# s\n~ a: 1\nb: 2\n# t\nb: 3\n", "# s\n~ a: 4\nb: 3\n# t\nb: 3\n"];
    assert_eq!(differences(kept, found, false), ["- s: b: 2", "+ s: b: 3"]);
    assert_eq!(differences(kept, found, true), ["- s: ~ a: 1", "- s: b: 2", "+ s: ~ a: 4", "+ s: b: 3"]);
    assert_eq!(differences(kept, kept, true), [""; 0]);
}
