//! Measures the processor time that the operating system needs to receive a megabyte and to provide fresh memory.
//! No server that stores what it receives can need less.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result};
use memmap2::{Advice, MmapMut};
use muster::sample_range::SampleRange;
use rustix::time::{ClockId, clock_gettime};

/// The size of one measurement, in MiB.
const MIB: usize = 16;

/// The processor time for a megabyte in microseconds, as measured between the servers' lives.
#[derive(Debug, Default)]
pub struct MemoryCosts {
    receiving: Vec<f64>,
    small: Vec<f64>,
    huge: Vec<f64>,
}

impl MemoryCosts {
    pub fn measure(&mut self) -> Result<()> {
        let (mut memory, huge) = fresh(true)?;
        self.huge.push(huge);
        self.receiving.push(receive(&mut memory)?);
        drop(memory);
        self.small.push(fresh(false)?.1);
        Ok(())
    }

    /// Returns the costs in one sentence, if any were measured.
    pub fn text(&self) -> Option<String> {
        let show = |values: &[f64]| {
            SampleRange::of(values.iter().copied())
                .map(|SampleRange { median, min, max }| format!("{median:.0} us ({min:.0}..{max:.0})"))
        };
        Some(format!(
            "The system's own price of one MiB in this run: {} to receive it into memory in use, {} for fresh memory in huge pages, {} in small ones.",
            show(&self.receiving)?,
            show(&self.huge)?,
            show(&self.small)?,
        ))
    }
}

/// Returns the processor time of this thread.
fn used() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

fn each_mib(since: Duration) -> f64 {
    (used() - since).as_secs_f64() * 1e6 / MIB as f64
}

/// Maps fresh memory, touches every page, and returns it with the time.
fn fresh(huge: bool) -> Result<(MmapMut, f64)> {
    let mut memory = MmapMut::map_anon(MIB << 20).context("no memory")?;
    if huge {
        memory.advise(Advice::HugePage).context("no huge pages")?;
    }
    let since = used();
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    let took = each_mib(since);
    Ok((memory, took))
}

/// Receives as many bytes as the memory holds, and returns the time.
fn receive(memory: &mut [u8]) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut sending = TcpStream::connect(listener.local_addr()?)?;
    let (mut receiving, _) = listener.accept()?;
    let length = memory.len();
    let sender = std::thread::spawn(move || sending.write_all(&vec![1; length]));
    let began = used();
    receiving.read_exact(memory)?;
    let took = each_mib(began);
    sender.join().ok().context("the sending thread has ended")??;
    Ok(took)
}
