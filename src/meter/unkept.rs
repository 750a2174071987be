//! The measuring types without the feature `metrics`: empty, with the methods of `kept.rs`, where they are
//! documented.

#![allow(clippy::unused_self, missing_docs, reason = "they are those of `kept.rs`")]

use std::marker::PhantomData;

use super::Timed;
use crate::clock::Clock;

pub const ON: bool = false;

#[derive(Debug, Default)]
pub struct Sharded<T>(T);

impl<T> Sharded<T> {
    pub fn mine(&self) -> &T {
        &self.0
    }

    pub fn all(&self) -> impl Iterator<Item = &T> {
        std::iter::once(&self.0)
    }
}

#[derive(Debug, Default)]
pub struct Count;

impl Count {
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
pub struct Times;

impl Times {
    pub fn add(&self, _from: Moment, _to: Moment) {}

    #[must_use]
    pub fn longest_ns(&self) -> u64 {
        0
    }

    pub fn forget_longest(&self) {}

    #[must_use]
    pub fn read(&self) -> Timed {
        Timed::default()
    }
}

#[derive(Debug, Default)]
pub struct Lock {
    pub waited: Times,
    pub held: Times,
}

impl Lock {
    pub fn sampled<'a>(&'a self, _clock: &'a Clock) -> Waiting<'a> {
        Waiting(PhantomData)
    }

    pub fn timed<'a>(&'a self, _clock: &'a Clock) -> Waiting<'a> {
        Waiting(PhantomData)
    }
}

#[derive(Debug)]
pub struct Waiting<'a>(PhantomData<&'a ()>);

impl<'a> Waiting<'a> {
    #[must_use]
    pub fn over(self) -> Holding<'a> {
        Holding(self.0)
    }
}

#[derive(Debug)]
pub struct Holding<'a>(PhantomData<&'a ()>);
