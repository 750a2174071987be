//! The stacks of one request. Equal stacks are stored once, with the tasks that have them, so ten thousand tasks with
//! equal stacks cost little more than one.
//!
//! Begin at [`StackGroups::add`].

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use super::answer::{StackFrame, StackSource, ThreadStack};
use crate::coordination::{TaskId, Timestamp};

/// The maximum number of names of threads that a group keeps.
const THREAD_NAMES_KEPT: usize = 4;
/// The memory of a group beside its texts, in bytes.
const GROUP_BYTES: usize = 256;
/// The memory of a frame beside its texts, in bytes.
const FRAME_BYTES: usize = size_of::<StackFrame>() + 32;
/// The memory of one task of a group, in bytes, with room for growth.
const TASK_BYTES: usize = 2 * size_of::<TaskId>();

/// The common key of equal stacks.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct StackKey {
    pub source: StackSource,
    /// The stacks are those of main threads.
    pub main: bool,
    pub frames: Vec<StackFrame>,
}

/// Equal stacks.
#[derive(Debug)]
pub(super) struct StackGroup {
    pub key: Arc<StackKey>,
    /// The tasks, in ascending order.
    pub tasks: Vec<TaskId>,
    /// The number of threads, of all tasks.
    pub threads: usize,
    pub thread_names: Vec<String>,
    pub frames_left_out: u32,
    /// The earliest time since which one of the threads has been in the innermost frame.
    pub since: Option<Timestamp>,
}

/// The stacks of one request.
#[derive(Debug, Default)]
pub(super) struct StackGroups {
    groups: Vec<StackGroup>,
    by_key: HashMap<Arc<StackKey>, usize>,
    bytes: usize,
}

impl StackGroups {
    /// Returns the memory of the stacks, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn groups(&self) -> &[StackGroup] {
        &self.groups
    }

    /// Adds the threads of a task. Returns false, and adds nothing, if the memory would exceed `most` bytes.
    pub fn add(
        &mut self,
        task: TaskId,
        source: StackSource,
        threads: Vec<ThreadStack>,
        now: Timestamp,
        most: usize,
    ) -> bool {
        // An upper bound: stacks that are stored already cost less.
        let mut cost = 0;
        let threads: Vec<(StackKey, ThreadStack)> = threads
            .into_iter()
            .map(|mut thread| {
                let frames = std::mem::take(&mut thread.frames);
                let key = StackKey { source, main: thread.main, frames };
                cost += TASK_BYTES;
                if !self.by_key.contains_key(&key) {
                    cost += key_bytes(&key);
                }
                (key, thread)
            })
            .collect();
        if self.bytes.saturating_add(cost) > most {
            return false;
        }
        for (key, thread) in threads {
            self.add_thread(task, key, &thread, now);
        }
        true
    }

    fn add_thread(&mut self, task: TaskId, key: StackKey, thread: &ThreadStack, now: Timestamp) {
        let key = Arc::new(key);
        let at = match self.by_key.entry(Arc::clone(&key)) {
            Entry::Occupied(found) => *found.get(),
            Entry::Vacant(place) => {
                place.insert(self.groups.len());
                self.bytes += key_bytes(&key);
                self.groups.push(StackGroup {
                    key,
                    tasks: Vec::new(),
                    threads: 0,
                    thread_names: Vec::new(),
                    frames_left_out: thread.frames_left_out,
                    since: None,
                });
                self.groups.len() - 1
            }
        };
        // The index comes from the table.
        let Some(group) = self.groups.get_mut(at) else { return };
        group.threads += 1;
        if group.thread_names.len() < THREAD_NAMES_KEPT && !group.thread_names.contains(&thread.name) {
            group.thread_names.push(thread.name.clone());
            self.bytes += thread.name.len();
        }
        let since = thread.for_ms.map(|ms| Timestamp(now.0.saturating_sub(ms.saturating_mul(1000))));
        group.since = group.since.into_iter().chain(since).min();
        if let Err(place) = group.tasks.binary_search(&task) {
            group.tasks.insert(place, task);
            self.bytes += TASK_BYTES;
        }
    }
}

/// Returns the memory of a new group, in bytes.
fn key_bytes(key: &StackKey) -> usize {
    let frame = |frame: &StackFrame| FRAME_BYTES + frame.function.len() + frame.file.len();
    GROUP_BYTES + key.frames.iter().map(frame).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp(10_000_000);

    fn thread(name: &str, main: bool, functions: &[&str]) -> ThreadStack {
        let frame =
            |function: &&str| StackFrame { function: (*function).into(), file: "train.py".into(), line: 1 };
        let frames = functions.iter().map(frame).collect();
        ThreadStack { name: name.into(), main, frames, frames_left_out: 0, for_ms: None }
    }

    #[test]
    fn equal_stacks_are_one_group_and_the_odd_one_is_another() {
        let mut stacks = StackGroups::default();
        for task in [7, 0, 1, 2, 3, 4, 6] {
            let threads = vec![thread("MainThread", true, &["main", "all_reduce"])];
            assert!(stacks.add(TaskId(task), StackSource::Python, threads, NOW, usize::MAX));
        }
        let odd = vec![thread("MainThread", true, &["main", "load_batch"])];
        assert!(stacks.add(TaskId(5), StackSource::Python, odd, NOW, usize::MAX));
        let seen: Vec<(&str, Vec<i32>)> = stacks
            .groups()
            .iter()
            .map(|group| {
                let innermost = group.key.frames.last().map_or("", |frame| &frame.function);
                (innermost, group.tasks.iter().map(|task| task.0).collect())
            })
            .collect();
        assert_eq!(seen, [("all_reduce", vec![0, 1, 2, 3, 4, 6, 7]), ("load_batch", vec![5])]);
    }

    #[test]
    fn main_threads_sources_and_ages_are_kept_apart() {
        let mut stacks = StackGroups::default();
        let mut waits = thread("MainThread", true, &["wait"]);
        waits.for_ms = Some(2_000);
        let pool = |name| thread(name, false, &["wait"]);
        assert!(stacks.add(
            TaskId(0),
            StackSource::Python,
            vec![waits.clone(), pool("a"), pool("b")],
            NOW,
            usize::MAX
        ));
        waits.for_ms = Some(5_000);
        assert!(stacks.add(TaskId(1), StackSource::Python, vec![waits.clone()], NOW, usize::MAX));
        assert!(stacks.add(TaskId(1), StackSource::Worker, vec![waits], NOW, usize::MAX));
        let groups = stacks.groups();
        assert_eq!(groups.len(), 3);
        assert_eq!((groups[0].tasks.len(), groups[0].threads), (2, 2));
        assert_eq!(groups[0].since, Some(Timestamp(5_000_000)), "the earliest");
        assert_eq!(
            (groups[1].threads, &groups[1].thread_names[..]),
            (2, &["a".to_owned(), "b".to_owned()][..])
        );
        assert_eq!(groups[1].tasks, [TaskId(0)]);
    }

    #[test]
    fn ten_thousand_equal_stacks_cost_little_and_the_memory_is_bounded() {
        let deep: Vec<String> = (0..60).map(|at| format!("function_{at}")).collect();
        let deep: Vec<&str> = deep.iter().map(String::as_str).collect();
        let mut stacks = StackGroups::default();
        for task in 0..10_000 {
            let threads = vec![thread("MainThread", true, &deep), thread("pool", false, &deep[..20])];
            assert!(stacks.add(TaskId(task), StackSource::Python, threads, NOW, 1 << 20));
        }
        assert!(stacks.bytes() < 200_000, "{}", stacks.bytes());
        let mut stacks = StackGroups::default();
        let (mut taken, most) = (0, 1 << 20);
        for task in 0..10_000 {
            let own = format!("function_{task}");
            let threads = vec![thread("MainThread", true, &[&own])];
            taken += usize::from(stacks.add(TaskId(task), StackSource::Python, threads, NOW, most));
        }
        assert!(taken > 1_000 && taken < 10_000, "{taken}");
        assert!(stacks.bytes() <= most);
        let before = (stacks.bytes(), stacks.groups().len());
        let large = vec![thread("MainThread", true, &["small"]), thread("x", false, &["y"; 20_000])];
        assert!(!stacks.add(TaskId(0), StackSource::Python, large, NOW, most));
        assert_eq!((stacks.bytes(), stacks.groups().len()), before, "all of an answer, or nothing");
    }
}
