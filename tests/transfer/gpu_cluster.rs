//! A cluster of two tasks, each with a GPU of its own.

use muster::transfer::{Arena, Buffer, EngineConfig, TransportChoice};
use simulated_gpu::{Counter, SimulatedGpu};

use crate::cluster::{AnyMemory, Cluster, contents, done};
use crate::gpu_driver::open_gpu;

/// A cluster of two tasks, each with a GPU of its own, or with the same one on a machine that has only one.
pub struct GpuCluster {
    /// The simulated driver, unless the GPUs are real ones.
    pub simulated: Option<&'static SimulatedGpu>,
    pub cluster: Cluster,
    pub arenas: Vec<Arena>,
}

/// Where the memory of a buffer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    Host,
    Gpu,
}

impl GpuCluster {
    pub fn new(setting: impl Fn(&mut EngineConfig)) -> Self {
        let simulated = SimulatedGpu::load_if_wanted();
        let cluster = Cluster::with(2, setting);
        let arena = |task| Arena::on_gpu(&open_gpu(task), 128 << 20).unwrap();
        Self { simulated, cluster, arenas: vec![arena(0), arena(1)] }
    }

    pub fn over(choice: TransportChoice) -> Self {
        Self::new(|config| config.transport = choice)
    }

    /// Returns the simulated driver of a test that runs over no other.
    pub fn simulated(&self) -> &'static SimulatedGpu {
        self.simulated.expect("the test runs over the simulated driver")
    }

    /// Returns a count of the simulated driver. A real one counts nothing: it is 0.
    pub fn count(&self, counter: Counter) -> i64 {
        self.simulated.map_or(0, |driver| driver.count(counter))
    }

    /// Asserts what the simulated driver counts.
    #[track_caller]
    pub fn assert_count(&self, counter: Counter, wanted: i64, what: &str) {
        if let Some(driver) = self.simulated {
            assert_eq!(driver.count(counter), wanted, "{counter:?}: {what}");
        }
    }

    pub fn allocate(&self, task: usize, memory: Memory, len: usize) -> Buffer {
        match memory {
            Memory::Host => self.cluster.arenas[task].allocate(len).unwrap(),
            Memory::Gpu => self.arenas[task].allocate(len).unwrap(),
        }
    }

    pub fn filled(&self, task: usize, memory: Memory, len: usize, seed: u64) -> Buffer {
        let buffer = self.allocate(task, memory, len);
        buffer.write_contents(0, &contents(len, seed)).unwrap();
        buffer
    }

    pub fn empty(&self, task: usize, memory: Memory, len: usize) -> Buffer {
        let buffer = self.allocate(task, memory, len);
        buffer.write_contents(0, &vec![0xee; len]).unwrap();
        buffer
    }

    /// Sends a buffer of the first task to one of the second, and asserts that both sides succeed.
    #[track_caller]
    pub fn send_to_end(&self, source: &Buffer, target: &Buffer, key: u64) {
        let (sent, received) = self.cluster.send(0, source, 1, target, key);
        assert_eq!((done(&sent).err(), done(&received).err()), (None, None), "key {key}");
    }

    /// Asserts that no copy of the engines blocked its caller.
    pub fn assert_no_copy_blocked(&self) {
        self.assert_count(Counter::PageableCopies, 0, "no copy blocks");
    }
}

/// Returns whether the receiver's GPU copies from the sender's.
pub fn is_direct(choice: TransportChoice) -> bool {
    matches!(choice, TransportChoice::Auto | TransportChoice::Shm)
}

/// Returns the contents of a buffer.
pub fn read(buffer: &Buffer) -> Vec<u8> {
    buffer.look(<[u8]>::to_vec).unwrap()
}
