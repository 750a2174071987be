//! Fatal errors of GPUs: the key under which jaxlib tells that a device of a process is lost to it.
//!
//! jaxlib 0.12 writes `cuda:gpu_fatal_error` with a text such as `Fatal GPU device error on node 3 device 1: …`. The node is
//! the task. No other process reads the key, so without the service the others' collectives hang. Begin at
//! [`FatalGpuError::parse`].

use super::ids::{TaskId, Timestamp};

/// The keys, by platform.
const KEYS: [&[u8]; 2] = [b"cuda:gpu_fatal_error", b"rocm:gpu_fatal_error"];
/// The characters of a status that are kept.
const STATUS_LENGTH_MAX: usize = 300;

/// A device that is lost to its process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FatalGpuError {
    /// The task.
    pub task: TaskId,
    /// The device, as its process numbers it.
    pub device: u32,
    /// The error.
    pub status: String,
    /// When it was told.
    pub at: Timestamp,
}

impl FatalGpuError {
    /// Returns the keys under which processes tell such errors.
    pub(super) fn keys() -> impl Iterator<Item = &'static [u8]> {
        KEYS.into_iter()
    }

    /// Returns whether a key of the store is one of these.
    pub(super) fn is_key(key: &[u8]) -> bool {
        KEYS.contains(&key)
    }

    /// Returns the error that a value tells. `writer` is the task that wrote it, if that is known: it counts if the text has
    /// another form.
    pub(super) fn parse(value: &[u8], writer: Option<TaskId>, at: Timestamp) -> Option<Self> {
        let text = String::from_utf8_lossy(&value[..value.len().min(STATUS_LENGTH_MAX * 4)]);
        let short = |status: &str| status.trim().chars().take(STATUS_LENGTH_MAX).collect();
        let told = text.split_once(" on node ").and_then(|(_, rest)| {
            let (task, rest) = rest.split_once(" device ")?;
            let (device, status) = rest.split_once(':')?;
            Some((TaskId(task.trim().parse().ok()?), device.trim().parse().ok()?, status))
        });
        let (task, device, status) = match told {
            Some(told) => told,
            None => (writer?, 0, &*text),
        };
        Some(Self { task, device, status: short(status), at })
    }

    /// Returns the error as a sentence.
    #[must_use]
    pub fn describe(&self) -> String {
        format!("GPU {} of task {} has a fatal error: {}", self.device, self.task, self.status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_jaxlib_names_task_and_device() {
        let at = Timestamp(5);
        let text = b"Fatal GPU device error on node 3 device 1: INTERNAL: CUDA error: an illegal address";
        let found = FatalGpuError::parse(text, Some(TaskId(0)), at).unwrap();
        assert_eq!((found.task, found.device), (TaskId(3), 1));
        assert_eq!(found.status, "INTERNAL: CUDA error: an illegal address");
        assert_eq!(
            found.describe(),
            "GPU 1 of task 3 has a fatal error: INTERNAL: CUDA error: an illegal address"
        );
        let other = FatalGpuError::parse(b"the GPU is gone", Some(TaskId(2)), at).unwrap();
        assert_eq!((other.task, &*other.status), (TaskId(2), "the GPU is gone"));
        assert_eq!(FatalGpuError::parse(b"on node x device 1: y", None, at), None);
        assert_eq!(FatalGpuError::parse(b"", None, at), None);
        let long = FatalGpuError::parse(&[b'a'; 100_000], Some(TaskId(2)), at).unwrap();
        assert_eq!(long.status.len(), STATUS_LENGTH_MAX);
        assert!(FatalGpuError::is_key(b"cuda:gpu_fatal_error") && !FatalGpuError::is_key(b"gpu_fatal_error"));
    }
}
