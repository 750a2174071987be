//! Members of cliques as the tests make them, each with memory of its own.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use muster_cliques::{
    CliqueError, CliqueId, CliqueMember, CliqueOperation, CliqueOptions, GpuClique, GpuCliqueKey, Nccl,
    OperationDirection,
};
use muster_gpu::{CopyDirection, DeviceMemory, PageLocked};
use simulated_gpu::{Counter, SimulatedGpu};

use crate::copying::{bytes_of, copy_whole, wait_until};
use crate::gpu_driver::{is_real, open_gpu};
use crate::isolated_test::run_isolated;
use crate::skip::{Lacking, skip};

pub type OutcomeReceiver = Receiver<Result<(), CliqueError>>;

/// Runs a test in a process of its own, over simulated NCCL with these settings.
pub fn run_on_simulated_nccl<F: FnOnce()>(settings: &str, body: F) {
    if is_real() {
        return skip(Lacking::Hardware("GPU on which several members of a clique can be"));
    }
    let library = SimulatedGpu::library();
    let library = library.to_str().unwrap();
    run_isolated(&[("SIMULATED_GPU", settings), ("MUSTER_NCCL_LIBRARY", library)], body);
}

/// Returns simulated NCCL.
pub fn nccl() -> &'static Nccl {
    SimulatedGpu::load();
    Nccl::get().unwrap()
}

/// Waits until there are so many communicators: the thread of a start that was aborted may take a moment to notice.
pub fn wait_for_communicators(count: i64) {
    wait_until("so many communicators", || SimulatedGpu::load().count(Counter::Communicators) == count);
}

/// Returns a member on the first device.
pub fn member(task: u32) -> CliqueMember {
    CliqueMember { task, incarnation: 100 + u64::from(task), device: 0 }
}

/// Returns the key of so many tasks with one member each.
pub fn key_of(tasks: u32) -> GpuCliqueKey {
    GpuCliqueKey::new((0..tasks).map(member)).unwrap()
}

/// Short limits, for tests that reach them.
pub fn quick() -> CliqueOptions {
    CliqueOptions { start_timeout: Duration::from_millis(300), ..CliqueOptions::default() }
}

/// Joins with one member of this process.
pub fn join(key: &GpuCliqueKey, id: CliqueId, task: u32, options: CliqueOptions) -> Arc<GpuClique> {
    GpuClique::start(nccl(), key, id, &[(member(task), open_gpu(0))], options).unwrap()
}

/// Joins with all members, each as a process of its own would.
pub fn join_all(tasks: u32, options: CliqueOptions) -> Vec<Arc<GpuClique>> {
    let (key, id) = (key_of(tasks), nccl().new_id().unwrap());
    let cliques: Vec<_> = (0..tasks).map(|task| join(&key, id, task, options)).collect();
    for clique in &cliques {
        assert_eq!(wait(&ready(clique)), Ok(()));
    }
    cliques
}

pub fn ready(clique: &GpuClique) -> OutcomeReceiver {
    let (tell, told) = channel();
    clique.when_ready(move |outcome| drop(tell.send(outcome)));
    told
}

pub fn outcome_at_end(clique: &GpuClique) -> OutcomeReceiver {
    let (tell, told) = channel();
    clique.when_ended(move |outcome| drop(tell.send(outcome)));
    told
}

/// Waits until no operation of the clique can touch memory.
pub fn ended(clique: &GpuClique) -> Result<(), CliqueError> {
    wait(&outcome_at_end(clique))
}

pub fn wait(told: &OutcomeReceiver) -> Result<(), CliqueError> {
    told.recv_timeout(Duration::from_secs(30)).expect("a listener is called")
}

/// Asserts that nothing is told for a moment.
pub fn assert_silent(told: &OutcomeReceiver) {
    assert!(told.recv_timeout(Duration::from_millis(50)).is_err(), "a listener was called");
}

/// Runs a batch.
pub fn run(clique: &Arc<GpuClique>, operations: &[CliqueOperation]) -> OutcomeReceiver {
    let (tell, told) = channel();
    // SAFETY: each test keeps its memory until it has the outcome.
    unsafe { clique.run(operations, move |outcome| drop(tell.send(outcome))) };
    told
}

pub fn send(rank: usize, peer: usize, memory: &DeviceMemory) -> CliqueOperation {
    operation(rank, peer, OperationDirection::Send, memory)
}

pub fn receive(rank: usize, peer: usize, memory: &DeviceMemory) -> CliqueOperation {
    operation(rank, peer, OperationDirection::Receive, memory)
}

fn operation(
    rank: usize,
    peer: usize,
    direction: OperationDirection,
    memory: &DeviceMemory,
) -> CliqueOperation {
    CliqueOperation { rank, peer, direction, address: memory.address(), len: memory.len() }
}

/// Returns memory on a device with bytes that depend on the seed.
pub fn filled(device: u32, len: usize, seed: u64) -> DeviceMemory {
    let gpu = open_gpu(device);
    let mut host = PageLocked::allocate(&gpu, len).unwrap();
    bytes_of(&mut host).copy_from_slice(&pattern(len, seed));
    let memory = DeviceMemory::allocate(&gpu, len).unwrap();
    copy_whole(&gpu, CopyDirection::ToDevice, &host, &memory).unwrap();
    memory
}

/// Returns the bytes of memory on a device.
pub fn contents(device: u32, memory: &DeviceMemory) -> Vec<u8> {
    let gpu = open_gpu(device);
    let mut host = PageLocked::allocate(&gpu, memory.len()).unwrap();
    copy_whole(&gpu, CopyDirection::ToHost, &host, memory).unwrap();
    bytes_of(&mut host).to_vec()
}

/// Returns the bytes that [`filled`] writes.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    std::iter::repeat_with(|| random.u8(..)).take(len).collect()
}
