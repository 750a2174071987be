//! The calls that wait for an answer, by their number. For each call, the table has the inbox that receives the
//! answer.
//!
//! The table is part of the state under the lock. `coordination` knows the condition for which a call waits. Begin at
//! [`WaitingCalls`].

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::coordination::{CallId, CallOutcome};

/// The recipient of answers to waiting calls: one for each connection.
pub trait AnswerInbox: Send + Sync {
    /// Receives the answer to the call that was made with `slot`. Called outside the engine's lock, on any
    /// thread; must not block.
    fn deliver(&self, slot: u64, outcome: CallOutcome);
}

/// One waiting call.
pub(super) struct WaitingCall {
    pub(super) inbox: Arc<dyn AnswerInbox>,
    pub(super) slot: u64,
}

/// The waiting calls. They are in many tables, so that none of them grows by much at once while the lock is
/// held.
#[derive(Default)]
pub(super) struct WaitingCalls {
    tables: [WaitingTable; Self::TABLES],
    len: usize,
    removed: usize,
}

pub(super) type WaitingTable = HashMap<CallId, WaitingCall, BuildHasherDefault<NumberHasher>>;

impl WaitingCalls {
    const TABLES: usize = 32;
    /// A table with at most this capacity is not shrunk.
    const KEPT: usize = 1 << 10;

    /// Returns the number of waiting calls.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    fn table_of(&mut self, call: CallId) -> &mut WaitingTable {
        let number = usize::try_from(call.0 % Self::TABLES as u64).unwrap_or_default();
        &mut self.tables[number]
    }

    pub(super) fn insert(&mut self, call: CallId, waiting: WaitingCall) {
        self.len += usize::from(self.table_of(call).insert(call, waiting).is_none());
    }

    /// Removes a call. A table that is replaced by a smaller one is added to `gone`, to be freed without the
    /// lock.
    pub(super) fn remove(&mut self, call: CallId, gone: &mut Vec<WaitingTable>) -> Option<WaitingCall> {
        let waiting = self.table_of(call).remove(&call)?;
        self.len -= 1;
        self.removed = self.removed.wrapping_add(1);
        // The memory of very many calls is given back, one table at a time: the tables empty at the same
        // pace, and the lock must not be held while all of them move their rest. The period is prime, so it
        // meets every table.
        const PERIOD: usize = 509;
        if self.removed.is_multiple_of(PERIOD) {
            let table = self.table_of(call);
            if table.capacity() > Self::KEPT && table.len() < table.capacity() / 8 {
                let mut smaller =
                    WaitingTable::with_capacity_and_hasher(table.capacity() / 4, <_>::default());
                smaller.extend(table.drain());
                gone.push(std::mem::replace(table, smaller));
            }
        }
        Some(waiting)
    }
}

/// A hasher for our own consecutive numbers: it spreads them over the high bits, which the table uses too.
#[derive(Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}
