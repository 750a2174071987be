//! The numbers of launches between two incarnations.
//!
//! They belong to the incarnations and outlive connections. If a connection broke between two launches and took the
//! numbers with it, the sides would be one apart, and the next launch of the same prepared transfer would take the
//! bytes of another. Begin at [`Numbers::take`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::schedule::GroupId;
use crate::base::sync::lock;

/// The next number of each channel between two lives. It outlives their connections: launches are counted, not those
/// that came through, so the sides stay in step when a connection breaks between two launches. A number is taken when a
/// launch is asked for, and the launch may follow later: when there is a connection, or never.
#[derive(Debug, Clone, Default)]
pub struct Numbers(Arc<Mutex<HashMap<u32, Channel>>>);

#[derive(Debug, Default)]
struct Channel {
    next: u64,
    /// Numbers that are taken and whose launches are still to come.
    open: Vec<u64>,
}

impl Numbers {
    /// Takes the number of a launch that is to come: the launch uses it up, or [`close`](Self::close).
    pub fn take(&self, channel: u32) -> GroupId {
        let mut channels = lock(&self.0);
        let numbers = channels.entry(channel).or_default();
        let sequence = numbers.next;
        numbers.next += 1;
        numbers.open.push(sequence);
        (channel, sequence)
    }

    /// Says that its launch has come, or does not.
    pub fn close(&self, (channel, sequence): GroupId) {
        if let Some(numbers) = lock(&self.0).get_mut(&channel)
            && let Some(at) = numbers.open.iter().position(|open| *open == sequence)
        {
            numbers.open.swap_remove(at);
        }
    }

    /// Returns whether this side has launched it, or never will.
    pub fn has_passed(&self, (channel, sequence): GroupId) -> bool {
        lock(&self.0)
            .get(&channel)
            .is_some_and(|numbers| sequence < numbers.next && !numbers.open.contains(&sequence))
    }
}
