//! The property of answers to requests for stacks: whatever a helper sends, little is kept, and it is safe to show.
//!
//! Begin at [`check_stack_answer`].

use super::answer::{NewStackAnswer, StackSource, check_threads};
use super::stack_groups::StackGroups;
use super::{FILE_BYTES_MAX, FRAMES_MAX, NAME_BYTES_MAX, THREADS_MAX};
use crate::coordination::Timestamp;
use crate::text::is_hidden_character;

/// The memory of the stacks in this property, in bytes.
const BYTES_MAX: usize = 16 << 10;

/// Decodes an answer, checks it, and stores it twice.
pub(crate) fn check_stack_answer(input: &[u8]) {
    let Ok(answer) = serde_json::from_slice::<NewStackAnswer>(input) else { return };
    let Ok(threads) = check_threads(answer.threads) else { return };
    assert!(threads.len() <= THREADS_MAX);
    for thread in &threads {
        assert!(thread.frames.len() <= FRAMES_MAX);
        let names = thread.frames.iter().map(|frame| (&frame.function, NAME_BYTES_MAX));
        let files = thread.frames.iter().map(|frame| (&frame.file, FILE_BYTES_MAX));
        for (text, most) in names.chain(files).chain([(&thread.name, NAME_BYTES_MAX)]) {
            assert!(!text.contains(is_hidden_character), "{text:?} is not safe to show");
            assert!(text.len() <= most + "…".len(), "{} bytes are kept", text.len());
        }
    }
    let mut stacks = StackGroups::default();
    for _ in 0..2 {
        let before = stacks.bytes();
        let now = Timestamp(1_700_000_000_000_000);
        let is_added = stacks.add(answer.task, StackSource::Python, threads.clone(), now, BYTES_MAX);
        assert!(stacks.bytes() <= BYTES_MAX && (is_added || stacks.bytes() == before));
        let threads: usize = stacks.groups().iter().map(|group| group.threads).sum();
        assert!(stacks.groups().len() <= threads);
    }
}
