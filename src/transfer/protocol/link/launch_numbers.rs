//! The numbers of launches between two incarnations.
//!
//! The numbers belong to the pair of incarnations and outlive its connections. If each connection had its own
//! numbers, and a connection broke between two launches, the counts of the two sides could differ by one. The next
//! launch of a prepared transfer would then receive the bytes of another launch. Begin at
//! [`LaunchNumbers::take_next`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::chunk_scheduler::GroupId;
use crate::base::sync::lock;

/// The next number of each channel between two incarnations. It counts the launches that were requested, not
/// those that succeeded, so the sides stay in step when a connection breaks between two launches. A number is
/// taken when a launch is requested; the launch itself may follow later, once there is a connection, or
/// never.
#[derive(Debug, Clone, Default)]
pub struct LaunchNumbers(Arc<Mutex<HashMap<u32, ChannelNumbers>>>);

#[derive(Debug, Default)]
struct ChannelNumbers {
    next: u64,
    /// The numbers that are taken and whose launches are still to come.
    open: Vec<u64>,
}

impl LaunchNumbers {
    /// Takes the number of a launch that is to come. The launch, or [`retire`](Self::retire), uses it up.
    pub fn take_next(&self, channel: u32) -> GroupId {
        let mut channels = lock(&self.0);
        let numbers = channels.entry(channel).or_default();
        let sequence = numbers.next;
        numbers.next += 1;
        numbers.open.push(sequence);
        (channel, sequence)
    }

    /// Closes a number: its launch has come, or never will.
    pub fn retire(&self, (channel, sequence): GroupId) {
        if let Some(numbers) = lock(&self.0).get_mut(&channel)
            && let Some(at) = numbers.open.iter().position(|open| *open == sequence)
        {
            numbers.open.swap_remove(at);
        }
    }

    /// Returns whether this side has launched the number, or never will.
    pub fn is_retired(&self, (channel, sequence): GroupId) -> bool {
        lock(&self.0)
            .get(&channel)
            .is_some_and(|numbers| sequence < numbers.next && !numbers.open.contains(&sequence))
    }
}
