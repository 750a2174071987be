//! The calls that a load generator has in progress, by number, and the parts of their answers received so far.

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;

use crate::wire::{self, Method};

/// The number of a call in progress.
pub type Slot = u32;

/// The received parts of the answers to all calls.
#[derive(Default)]
pub struct Calls {
    slots: Vec<Answer>,
    free: Vec<Slot>,
}

struct Answer {
    method: Method,
    body: Vec<u8>,
    http: Option<u32>,
    status: Option<u32>,
    error: String,
    /// The failure of the transport, if it has failed.
    failure: Option<String>,
    finished: bool,
}

/// The answer of a server.
#[derive(Debug)]
pub struct Reply {
    pub method: Method,
    pub status: u32,
    pub error: String,
    message: Bytes,
}

impl Reply {
    /// Returns the message of an answer that must be a success.
    pub fn ok(self) -> Result<Bytes> {
        ensure!(self.status == 0, "{:?} failed with status {}: {}", self.method, self.status, self.error);
        Ok(self.message)
    }
}

impl Calls {
    pub fn begin(&mut self, method: Method) -> Slot {
        let answer = Answer {
            method,
            body: Vec::new(),
            http: None,
            status: None,
            error: String::new(),
            failure: None,
            finished: false,
        };
        if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = answer;
            return slot;
        }
        self.slots.push(answer);
        self.slots.len() as Slot - 1
    }

    pub fn add(&mut self, slot: Slot, piece: &[u8], most: u32) -> Result<()> {
        let answer = &mut self.slots[slot as usize];
        if let (true, Some(length)) = (answer.body.is_empty(), piece.get(1..wire::PREFIX)) {
            let length = u32::from_be_bytes(length.try_into()?);
            ensure!(
                length < most,
                "an answer of {length} bytes needs its window widened, which is not done here"
            );
            answer.body.reserve_exact(wire::PREFIX + length as usize);
        }
        answer.body.extend_from_slice(piece);
        Ok(())
    }

    pub fn header(&mut self, slot: Slot, name: &[u8], value: &[u8]) {
        let answer = &mut self.slots[slot as usize];
        let text = || String::from_utf8_lossy(value);
        match name {
            b":status" => answer.http = text().parse().ok(),
            b"grpc-status" => answer.status = text().parse().ok(),
            b"grpc-message" => {
                answer.error = percent_encoding::percent_decode(value).decode_utf8_lossy().into_owned();
            }
            _ => {}
        }
    }

    pub fn finish(&mut self, slot: Slot, failure: Option<String>) {
        let answer = &mut self.slots[slot as usize];
        answer.finished = true;
        answer.failure = failure;
    }

    pub fn is_finished(&self, slot: Slot) -> bool {
        self.slots[slot as usize].finished
    }

    /// Removes and returns the answer to a finished call.
    pub fn take(&mut self, slot: Slot) -> Result<Reply> {
        let answer = &mut self.slots[slot as usize];
        self.free.push(slot);
        let method = answer.method;
        let mut read = || {
            if let Some(failure) = answer.failure.take() {
                anyhow::bail!(failure);
            }
            ensure!(answer.http == Some(200), "HTTP status {:?}", answer.http);
            let status = answer.status.context("no grpc-status")?;
            let error = std::mem::take(&mut answer.error);
            let message = wire::unframe(std::mem::take(&mut answer.body).into())?;
            Ok(Reply { method, status, error, message })
        };
        read().with_context(|| format!("{method:?}"))
    }
}
