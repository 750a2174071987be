//! The measuring types without the feature `metrics`: empty, with the methods of `enabled.rs`, where they are
//! documented.

#![allow(clippy::unused_self, missing_docs, reason = "they are those of `enabled.rs`")]

use std::marker::PhantomData;

use super::HistogramSnapshot;
use crate::clock::Clock;

pub const ENABLED: bool = false;

#[derive(Debug, Default)]
pub struct Sharded<T>(T);

impl<T> Sharded<T> {
    pub fn local(&self) -> &T {
        &self.0
    }

    pub fn all(&self) -> impl Iterator<Item = &T> {
        std::iter::once(&self.0)
    }
}

#[derive(Debug, Default)]
pub struct Counter;

impl Counter {
    pub fn add(&self) {}

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
    pub fn add(&self, _from: Moment, _to: Moment) {}

    #[must_use]
    pub fn longest_ns(&self) -> u64 {
        0
    }

    pub fn reset_longest(&self) {}

    #[must_use]
    pub fn read(&self) -> HistogramSnapshot {
        HistogramSnapshot::default()
    }
}

#[derive(Debug, Default)]
pub struct LockTimes {
    pub waited: Histogram,
    pub held: Histogram,
}

impl LockTimes {
    pub fn wait_sampled<'a>(&'a self, _clock: &'a Clock) -> LockWait<'a> {
        LockWait(PhantomData)
    }

    pub fn wait_timed<'a>(&'a self, _clock: &'a Clock) -> LockWait<'a> {
        LockWait(PhantomData)
    }
}

#[derive(Debug)]
pub struct LockWait<'a>(PhantomData<&'a ()>);

impl<'a> LockWait<'a> {
    #[must_use]
    pub fn acquired(self) -> LockHold<'a> {
        LockHold(self.0)
    }
}

#[derive(Debug)]
pub struct LockHold<'a>(PhantomData<&'a ()>);
