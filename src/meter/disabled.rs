//! The measuring types of a build without the cargo feature `metrics`. They measure nothing, and their methods do
//! nothing.
//!
//! `enabled.rs` documents the methods. Begin there.

#![allow(clippy::unused_self, missing_docs, reason = "they are those of `enabled.rs`")]

use std::marker::PhantomData;

use super::HistogramSnapshot;
use crate::clock::{Clock, Timestamp};

pub const ENABLED: bool = false;

#[derive(Debug, Default)]
pub struct Sharded<T>(T);

impl<T> Sharded<T> {
    pub fn shard_of_this_thread(&self) -> &T {
        &self.0
    }

    pub fn all_shards(&self) -> impl Iterator<Item = &T> {
        std::iter::once(&self.0)
    }
}

#[derive(Debug, Default)]
pub struct Counter;

impl Counter {
    pub fn increment(&self) {}

    pub fn add_many(&self, _many: u64) {}

    #[must_use]
    pub fn get(&self) -> u64 {
        0
    }
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Moment;

impl Moment {
    #[must_use]
    pub fn now(_clock: &Clock) -> Self {
        Self
    }
}

#[derive(Debug, Default)]
pub struct Histogram;

impl Histogram {
    pub fn add_interval(&self, _from: Moment, _to: Moment) {}

    #[must_use]
    pub fn longest_ns(&self) -> u64 {
        0
    }

    pub fn reset_longest(&self) {}

    #[must_use]
    pub fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot::default()
    }
}

#[derive(Debug, Default)]
pub struct LockTimes {
    pub waited: Histogram,
    pub held: Histogram,
}

impl LockTimes {
    pub fn begin_sampled_wait<'a>(&'a self, _clock: &'a Clock) -> LockWait<'a> {
        LockWait(PhantomData)
    }

    pub fn begin_wait_for_timed_hold<'a>(&'a self, _clock: &'a Clock) -> LockWait<'a> {
        LockWait(PhantomData)
    }

    pub fn begin_timed_wait<'a>(&'a self, _clock: &'a Clock) -> LockWait<'a> {
        LockWait(PhantomData)
    }
}

#[derive(Debug)]
pub struct LockWait<'a>(PhantomData<&'a ()>);

impl<'a> LockWait<'a> {
    #[must_use]
    pub fn begin_hold(self) -> LockHold<'a> {
        LockHold(self.0)
    }
}

#[derive(Debug)]
pub struct LockHold<'a>(PhantomData<&'a ()>);

impl LockHold<'_> {
    #[must_use]
    pub fn began_at(&self) -> Option<Timestamp> {
        None
    }
}
