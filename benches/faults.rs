//! Measures how soon the transfer engine reports that a peer was killed, or has stopped, in the middle of a
//! transfer.
//!
//! This process receives from two other processes, which send without end. The benchmark kills one of the two
//! (SIGKILL) or stops it (SIGSTOP) during a transfer. It measures the time from the signal until the last transfer
//! with that process has failed. Meanwhile no transfer with the other process may fail.
//!
//!     cargo bench --bench faults -- --repeat 20

#[path = "../tests/harness/mod.rs"]
mod harness;

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use muster::sample_range::SampleRange;
use muster::transfer::{
    Arena, DeviceId, EngineConfig, Incarnation, LaunchOptions, MemberId, MemberInfo, Membership,
    PreparedTransfers, TaskId, TransferEngine, TransferError, TransferKey, TransferSpec, TransportChoice,
};
use rustix::process::set_parent_process_death_signal;

use harness::{PATIENCE, Process, Signal};

const LEN: usize = 16 << 20;
/// Transfers with each peer that are under way.
const SLOTS: u32 = 2;
const CHOICES: [TransportChoice; 4] =
    [TransportChoice::Shm, TransportChoice::Pvm, TransportChoice::Unix, TransportChoice::Tcp];

/// Times how soon faults of peers are told.
#[derive(Debug, Parser)]
#[command(name = "faults")]
struct Arguments {
    /// How often each fault is made.
    #[arg(long, default_value_t = 20)]
    repeat: u64,
    /// The stall limit of transfers with a peer that is stopped, in milliseconds.
    #[arg(long, default_value_t = 500)]
    stall: u64,
    /// Be the peer of this task number and incarnation, by this transport.
    #[arg(long, hide = true, num_args = 3)]
    peer: Option<Vec<String>>,
    /// Cargo says so to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

#[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
fn now() -> Instant {
    Instant::now()
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Some(peer) = &arguments.peer {
        return send_without_end(peer);
    }
    println!("| a peer is | by | until the last transfer with it has failed | the other peer meanwhile |");
    println!("| --- | --- | --- | --- |");
    let stall = Duration::from_millis(arguments.stall);
    for (signal, what) in [(Signal::KILL, "killed"), (Signal::STOP, "stopped")] {
        for choice in CHOICES {
            let mut times = Vec::new();
            let mut others = 0;
            for round in 0..arguments.repeat {
                let (time, other) = fault(choice, signal, stall, round)?;
                times.push(time.as_secs_f64() * 1e3);
                others += other;
            }
            let SampleRange { median, min, max } = SampleRange::of(times).context("no repetition")?;
            let share = if signal == Signal::STOP {
                format!(", {:.2} of the stall limit", median / arguments.stall as f64)
            } else {
                String::new()
            };
            println!(
                "| {what} | {} | {median:.1} ms ({min:.1}..{max:.1}){share} | {others} transfers, none lost |",
                name(choice)
            );
        }
    }
    Ok(())
}

fn name(choice: TransportChoice) -> String {
    serde_json::to_string(&choice).unwrap_or_default().trim_matches('"').to_owned()
}

fn member(task: u32, incarnation: u64) -> Result<MemberId> {
    let incarnation = Incarnation::new(incarnation).context("an incarnation is not 0")?;
    Ok(MemberId::of_own_job(TaskId(task), incarnation))
}

fn start(here: MemberId, choice: TransportChoice) -> Result<TransferEngine> {
    let mut config = EngineConfig::new(here, vec![DeviceId(here.task.0)]);
    config.transport = choice;
    Ok(TransferEngine::start(config)?)
}

fn prepare(
    engine: &TransferEngine,
    from: u32,
    to: u32,
    here: u32,
    stall: Duration,
) -> Result<Vec<PreparedTransfers>> {
    let arena = Arena::new(SLOTS as usize * LEN)?;
    (0..SLOTS)
        .map(|slot| {
            let (span, key) = (arena.allocate(LEN)?.full_span(), TransferKey(slot.into()));
            let (from, to) = (DeviceId(from), DeviceId(to));
            let spec = if here == from.0 {
                TransferSpec::send(span, from, to, key)
            } else {
                TransferSpec::receive(span, from, to, key)
            };
            // A channel for each: none waits for another.
            let options = LaunchOptions { channel: slot, stall, ..LaunchOptions::default() };
            Ok(engine.prepare(vec![spec], options).wait()?)
        })
        .collect()
}

/// A peer: says where it is, hears who else is there, and sends to task 0 until it is killed.
fn send_without_end(words: &[String]) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let [task, incarnation, choice] = words else { bail!("a task, an incarnation and a transport") };
    let here = member(task.parse()?, incarnation.parse()?)?;
    let engine = start(here, serde_json::from_str(&format!("\"{choice}\""))?)?;
    let (address, devices) = (engine.address().clone(), vec![DeviceId(here.task.0)]);
    let peer = MemberInfo { incarnation: here.incarnation, address, devices };
    println!("{}", serde_json::to_string(&(here.task, peer))?);
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    engine.on_membership(serde_json::from_str(&line)?);
    let mut slots = prepare(&engine, here.task.0, 0, here.task.0, Duration::from_secs(30))?;
    let mut under_way: Vec<_> = slots.iter_mut().map(|slot| slot.launch(&[])).collect();
    loop {
        for (slot, transfer) in slots.iter_mut().zip(&mut under_way) {
            transfer.wait()?;
            *transfer = slot.launch(&[]);
        }
    }
}

fn start_peer(task: u32, incarnation: u64, choice: TransportChoice) -> Result<Process> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--peer", &task.to_string(), &incarnation.to_string(), &name(choice)]);
    Process::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()))
}

/// One fault: how long it took to be told, and how many transfers the other peer completed meanwhile.
fn fault(choice: TransportChoice, signal: Signal, stall: Duration, round: u64) -> Result<(Duration, u64)> {
    let here = member(0, 1 + round)?;
    let engine = start(here, choice)?;
    let mut peers = [start_peer(1, 1 + round, choice)?, start_peer(2, 1 + round, choice)?];
    let (address, devices) = (engine.address().clone(), vec![DeviceId(0)]);
    let mut membership = Membership::default();
    membership.peers.insert(here.task, MemberInfo { incarnation: here.incarnation, address, devices });
    for peer in &mut peers {
        let (task, told): (TaskId, MemberInfo) = serde_json::from_str(&peer.read_line(PATIENCE)?)?;
        membership.peers.insert(task, told);
    }
    engine.on_membership(membership.clone());
    let line = serde_json::to_string(&membership)?;
    for peer in &peers {
        peer.say(&line)?;
    }
    let mut victim = prepare(&engine, 1, 0, 0, stall)?;
    let mut other = prepare(&engine, 2, 0, 0, Duration::from_secs(30))?;
    let (over, moved) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let going_on = scope.spawn(|| -> Result<(), TransferError> {
            while !over.load(Ordering::Relaxed) {
                for slot in &mut other {
                    slot.launch(&[]).wait()?;
                    moved.fetch_add(1, Ordering::Relaxed);
                }
            }
            Ok(())
        });
        let told = (|| {
            for _ in 0..4 {
                for slot in &mut victim {
                    slot.launch(&[]).wait()?;
                }
            }
            let mut under_way: Vec<_> = victim.iter_mut().map(|slot| slot.launch(&[])).collect();
            // Somewhere within them.
            std::thread::sleep(Duration::from_micros(round * 397 % 1500));
            let before = moved.load(Ordering::Relaxed);
            let mut began = now();
            peers[0].signal(signal);
            // A launch of the peer may be complete: its bytes are fetched from its memory although it stands still.
            let mut tries = 0;
            while under_way.iter().filter(|transfer| transfer.wait().is_err()).count() == 0 {
                tries += 1;
                ensure!(tries < 10, "a peer that is {signal:?} sends on and on");
                began = now();
                under_way = victim.iter_mut().map(|slot| slot.launch(&[])).collect();
            }
            let took = now() - began;
            Ok((took, moved.load(Ordering::Relaxed) - before))
        })();
        over.store(true, Ordering::Relaxed);
        match going_on.join() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => bail!("the other peer lost a transfer: {error}"),
            Err(_) => bail!("the thread of the other peer has failed"),
        }
        told
    })
}
