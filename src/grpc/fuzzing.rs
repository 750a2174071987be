//! Checks properties of request bodies and request messages that hold for every input.
//!
//! The fuzz targets and the tests run these checks (`src/fuzzing.rs`). Begin at [`check_request_body`] and
//! [`check_request_message`].

use std::task::{Context, Poll, Waker};

use libdeflater::{CompressionLvl, Compressor};

use super::body_memory::{ConnectionQuota, MemoryPool};
use super::decoded_call::DecodedCall;
use super::frame::{PREFIX_LEN, RequestMessage};
use super::gzip::GzipFile;
use super::request_body::RequestBody;
use super::task_set_cache::TaskSetCache;
use super::{generation_a, generation_c};
use crate::coordination::Failure;

/// How long a message may be, inflated. No longer than what a connection inflates by itself.
const MESSAGE_BYTES: usize = 1 << 20;
/// The memory for bodies: less than the longest message, so that bodies wait for it.
const POOL_BYTES: usize = 256 << 10;
/// A body that waits for memory gets it after so many looks, since no other body waits.
const LOOKS_MAX: usize = 8;

const METHODS: [&str; 21] = [
    "RegisterTask",
    "Heartbeat",
    "PollForError",
    "WaitForAllTasks",
    "ShutdownTask",
    "ResetTask",
    "ReportErrorToTask",
    "ReportErrorToService",
    "GetTaskState",
    "GetJobState",
    "WatchJobState",
    "InsertKeyValue",
    "GetKeyValue",
    "TryGetKeyValue",
    "IncrementKeyValue",
    "GetKeyValueDir",
    "DeleteKeyValue",
    "Barrier",
    "CancelBarrier",
    "GetAliveTasks",
    "WatchTasks",
];

/// Compresses a message, as clients do.
fn compress(message: &[u8]) -> Vec<u8> {
    let mut compressor = Compressor::new(CompressionLvl::default());
    let mut file = vec![0; compressor.gzip_compress_bound(message.len())];
    let length = compressor.gzip_compress(message, &mut file).expect("there is room for all of it");
    file.truncate(length);
    file
}

/// Takes a body in pieces of `step` bytes, as the data of a call or straight into its room.
fn receive_body_in_pieces(bytes: &[u8], compresses: bool, step: usize) -> Result<Vec<u8>, Failure> {
    let pool = MemoryPool::new(POOL_BYTES);
    let taken = {
        let mut quota = ConnectionQuota::new(&pool);
        let sets = TaskSetCache::default();
        let mut body = RequestBody::new(compresses);
        let mut context = Context::from_waker(Waker::noop());
        let mut outcome = None;
        let mut left = bytes;
        let mut looks = 0;
        while outcome.is_none() {
            let (piece, rest) = left.split_at(step.min(left.len()));
            left = rest;
            if let Err(failure) = body.receive_data(piece, left.is_empty(), &mut quota, &sets, MESSAGE_BYTES)
            {
                outcome = Some(Err(failure));
            } else if let Poll::Ready(message) = body.poll_message(&mut context, &mut quota, MESSAGE_BYTES) {
                outcome = Some(message);
            } else if left.is_empty() {
                looks += 1;
                assert!(looks < LOOKS_MAX, "a body that is whole and alone waits for nothing");
            }
        }
        outcome.expect("the loop ends with an outcome").map(|message| message.bytes().to_vec())
    };
    assert_eq!(pool.taken_bytes(), 0, "a body gives its memory back");
    taken
}

/// Takes the body of a call. The first byte says whether messages are compressed, the second where the body is cut.
///
/// However it is cut, it is the same message or the same failure; and every message comes back from what it is framed as,
/// compressed or not.
pub(crate) fn check_request_body(input: &[u8]) {
    let [flags, step, input @ ..] = input else { return };
    let (compresses, step) = (flags & 1 != 0, usize::from(*step) + 1);
    let whole = receive_body_in_pieces(input, compresses, usize::MAX);
    let pieces = receive_body_in_pieces(input, compresses, step);
    assert_eq!(
        whole.as_ref().map_err(|failure| failure.code),
        pieces.as_ref().map_err(|failure| failure.code),
        "in pieces of {step}"
    );
    if let Ok(message) = &whole {
        assert!(message.len() <= MESSAGE_BYTES);
    }
    if let Some(in_place) = RequestMessage::of_short_body(input, MESSAGE_BYTES) {
        assert_eq!(whole.as_deref(), Ok(&*in_place.contents()));
    }
    let framed = |flag: u8, message: &[u8]| {
        let length = u32::try_from(message.len()).expect("an input is short");
        [&[flag][..], &length.to_be_bytes(), message].concat()
    };
    for (flag, message) in [(0, input.to_vec()), (1, compress(input))] {
        let framed = framed(flag, &message);
        assert_eq!(framed.len(), PREFIX_LEN + message.len());
        for step in [usize::MAX, step] {
            assert_eq!(receive_body_in_pieces(&framed, true, step).as_deref(), Ok(input));
        }
    }
}

/// Reads a message as the request of one method of each generation. The first byte says which method.
///
/// It means the same when the sets of tasks in it are known from before.
pub(crate) fn check_request_message(input: &[u8]) {
    let Some((method, input)) = input.split_first() else { return };
    let method = METHODS[usize::from(*method) % METHODS.len()];
    for reader in
        [generation_a::request_decoder(method), generation_c::request_decoder(method)].into_iter().flatten()
    {
        let sets = TaskSetCache::default();
        let message = RequestMessage::new(input.to_vec());
        let told = |read: Result<DecodedCall, Failure>| {
            read.map(|call| (call.request, call.claim)).map_err(|failure| failure.code)
        };
        let first = told(reader(&message, &sets));
        assert_eq!(first, told(reader(&message, &sets)));
        assert_eq!(first, told(reader(&RequestMessage::Received(input), &sets)));
        // As a client sends it that compresses: inflated, and then found by its bytes.
        let file = compress(input);
        for _ in 0..2 {
            let message = GzipFile::parse(&file).and_then(|gzip| sets.inflate_or_look_up(&file, &gzip));
            let message = message.expect("it is compressed well");
            assert_eq!(message.bytes(), input);
            assert_eq!(first, told(reader(&message, &sets)));
        }
    }
}
