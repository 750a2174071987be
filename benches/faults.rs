//! How soon the engine tells of a peer that was killed in the middle of a transfer, and of one that stands still.
//!
//! Real processes: this one receives from two others, which send without end. One of them is killed (SIGKILL) or stopped
//! (SIGSTOP) while its bytes come; what is timed is from the signal until the last of the transfers with it has failed.
//! The other one goes on meanwhile, and loses nothing.
//!
//!     cargo bench --bench faults -- --repeat 20

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use muster::transfer::{
    Arena, Choice, Config, DeviceId, Engine, Incarnation, LaunchOptions, Member, Membership, Peer, Prepared,
    Spec, TaskId, TransferError, TransferKey,
};
use rustix::process::{Pid, Signal, kill_process};

const LEN: usize = 16 << 20;
/// Transfers with each peer that are under way.
const SLOTS: u32 = 2;
const CHOICES: [Choice; 4] = [Choice::Shm, Choice::Pvm, Choice::Unix, Choice::Tcp];

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
            times.sort_by(f64::total_cmp);
            let (median, least, most) = (times[times.len() / 2], times[0], times[times.len() - 1]);
            let share = if signal == Signal::STOP {
                format!(", {:.2} of the stall limit", median / arguments.stall as f64)
            } else {
                String::new()
            };
            println!(
                "| {what} | {} | {median:.1} ms ({least:.1}..{most:.1}){share} | {others} transfers, none lost |",
                name(choice)
            );
        }
    }
    Ok(())
}

fn name(choice: Choice) -> String {
    serde_json::to_string(&choice).unwrap_or_default().trim_matches('"').to_owned()
}

fn member(task: u32, incarnation: u64) -> Result<Member> {
    let incarnation = Incarnation::new(incarnation).context("an incarnation is not 0")?;
    Ok(Member { task: TaskId(task), incarnation })
}

fn start(here: Member, choice: Choice) -> Result<Engine> {
    let mut config = Config::new(here, vec![DeviceId(here.task.0)]);
    config.transport = choice;
    Ok(Engine::start(config)?)
}

fn prepare(engine: &Engine, from: u32, to: u32, here: u32, stall: Duration) -> Result<Vec<Prepared>> {
    let arena = Arena::new(SLOTS as usize * LEN)?;
    (0..SLOTS)
        .map(|slot| {
            let (span, key) = (arena.allocate(LEN)?.span(), TransferKey(slot.into()));
            let (from, to) = (DeviceId(from), DeviceId(to));
            let spec = if here == from.0 {
                Spec::send(span, from, to, key)
            } else {
                Spec::receive(span, from, to, key)
            };
            // A channel for each: none waits for another.
            let options = LaunchOptions { channel: slot, stall, ..LaunchOptions::default() };
            Ok(engine.prepare(vec![spec], options).wait()?)
        })
        .collect()
}

/// A peer: says where it is, hears who else is there, and sends to task 0 until it is killed.
fn send_without_end(words: &[String]) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let [task, incarnation, choice] = words else { bail!("a task, an incarnation and a transport") };
    let here = member(task.parse()?, incarnation.parse()?)?;
    let engine = start(here, serde_json::from_str(&format!("\"{choice}\""))?)?;
    let (address, devices) = (engine.address().clone(), vec![DeviceId(here.task.0)]);
    let peer = Peer { incarnation: here.incarnation, address, devices };
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

struct Process {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Process {
    fn start(task: u32, incarnation: u64, choice: Choice) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--peer", &task.to_string(), &incarnation.to_string(), &name(choice)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let orders = child.stdin.take().context("no pipe to the peer")?;
        let answers = BufReader::new(child.stdout.take().context("no pipe from the peer")?);
        Ok(Self { child, orders, answers })
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One fault: how long it took to be told, and how many transfers the other peer completed meanwhile.
fn fault(choice: Choice, signal: Signal, stall: Duration, round: u64) -> Result<(Duration, u64)> {
    let here = member(0, 1 + round)?;
    let engine = start(here, choice)?;
    let mut peers = [Process::start(1, 1 + round, choice)?, Process::start(2, 1 + round, choice)?];
    let (address, devices) = (engine.address().clone(), vec![DeviceId(0)]);
    let mut membership = Membership::default();
    membership.peers.insert(here.task, Peer { incarnation: here.incarnation, address, devices });
    for peer in &mut peers {
        let mut line = String::new();
        peer.answers.read_line(&mut line)?;
        let (task, told): (TaskId, Peer) = serde_json::from_str(&line)?;
        membership.peers.insert(task, told);
    }
    engine.on_membership(membership.clone());
    let line = serde_json::to_string(&membership)? + "\n";
    for peer in &mut peers {
        peer.orders.write_all(line.as_bytes())?;
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
            peers[0].signal(signal)?;
            // What a peer had launched may be through, and taken from its memory though it stands still.
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
