//! Reads request bodies into memory, within a budget of the server and a budget of each client network.
//!
//! `access/middleware.rs` calls [`read_body`] after every check that needs only the head of a request. The handler
//! receives a body that is already in memory, so no route can read a body in another way. Begin at [`read_body`],
//! then [`BodyMemoryBudget`].
//!
//! A body is copied into one contiguous buffer. If a client sends one byte in each packet, the connection allocates
//! a buffer for every packet. Because of the copy, each of these buffers is freed at once. Memory is charged to the
//! budget before it is allocated. The buffer grows with the bytes that have arrived, so an announced length alone
//! takes no memory from other requests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use axum::http::StatusCode;
use bytes::Bytes;
use http_body_util::BodyExt as _;
use percent_encoding::percent_decode_str;
use tokio::time::{Instant, timeout_at};

use super::{ClientNetwork, Problem};
use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};

/// The maximum length of a request body, in bytes.
pub(super) const BODY_BYTES_MAX: usize = 256 << 10;
/// The maximum time for a whole body.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// The time during which the rate of a body is not checked.
const RATE_GRACE: Duration = Duration::from_secs(2);
/// The minimum rate of a body after that time.
const RATE_MIN_BYTES_PER_SECOND: u64 = 1 << 10;
/// The first allocation for a body, in bytes.
const INITIAL_CAPACITY: usize = 4 << 10;

/// Returns the value of a field of a form.
pub(super) fn form_field_value(form: &[u8], name: &str) -> Option<String> {
    let form = std::str::from_utf8(form).ok()?;
    let value = form.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name)?.1;
    let value = value.replace('+', " ");
    percent_decode_str(&value).decode_utf8().ok().map(std::borrow::Cow::into_owned)
}

#[derive(Default)]
struct BudgetUsage {
    bytes: usize,
    by_source: HashMap<ClientNetwork, usize>,
}

/// The memory for request bodies, in total and for each client network.
pub struct BodyMemoryBudget {
    limit: usize,
    limit_per_source: usize,
    used: Mutex<BudgetUsage>,
}

impl Default for BodyMemoryBudget {
    fn default() -> Self {
        Self::new(Self::DEFAULT)
    }
}

impl BodyMemoryBudget {
    /// The default budget, in bytes.
    pub const DEFAULT: usize = 32 << 20;
    /// The number of equal shares of the budget; one client network may use one share.
    const SOURCES: usize = 4;

    /// Returns a budget of this many bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit, limit_per_source: limit / Self::SOURCES, used: Mutex::default() }
    }

    /// Reserves `bytes` of the budget; `None` if they are not available.
    fn reserve(self: &Arc<Self>, source: ClientNetwork, bytes: usize) -> Option<BodyPermit> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let all = used.bytes.checked_add(bytes)?;
        let own = used.by_source.get(&source).copied().unwrap_or_default().checked_add(bytes)?;
        if all > self.limit || own > self.limit_per_source {
            return None;
        }
        used.bytes = all;
        used.by_source.insert(source, own);
        Some(BodyPermit { budget: Arc::clone(self), source, bytes })
    }

    fn used_bytes(&self) -> usize {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }
}

impl MetricSource for BodyMemoryBudget {
    fn write_samples(&self, page: &mut ScrapeOutput) {
        page.add_usize_sample(&metric::HTTP_BODIES_BYTES, &[], self.used_bytes());
        page.add_usize_sample(&metric::HTTP_BODIES_BYTES_LIMIT, &[], self.limit);
    }
}

/// Reserved bytes, which return to the budget when this is dropped.
pub(super) struct BodyPermit {
    budget: Arc<BodyMemoryBudget>,
    source: ClientNetwork,
    bytes: usize,
}

impl Drop for BodyPermit {
    fn drop(&mut self) {
        let mut used = self.budget.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.bytes = used.bytes.saturating_sub(self.bytes);
        if let Some(own) = used.by_source.get_mut(&self.source) {
            *own = own.saturating_sub(self.bytes);
            if *own == 0 {
                used.by_source.remove(&self.source);
            }
        }
    }
}

/// Reads a body of at most `limit` bytes. The caller holds the permit for as long as the bytes are in memory.
///
/// # Errors
/// If the body is too long, too slow or incomplete, or the budget is spent. The problem says which.
pub(super) async fn read_body(
    budget: &Arc<BodyMemoryBudget>,
    source: ClientNetwork,
    mut body: Body,
    limit: usize,
) -> Result<(Bytes, Option<BodyPermit>), Problem> {
    let began = Instant::now();
    let announced = body.size_hint();
    if announced.lower() > limit as u64 {
        return Err(Problem::body_too_long(limit));
    }
    let expected = announced.upper().and_then(|most| usize::try_from(most).ok()).unwrap_or(limit).min(limit);
    let mut bytes = Vec::new();
    let mut permit = None;
    loop {
        let frame = match timeout_at(next_byte_deadline(began, bytes.len()), body.frame()).await {
            Err(_) => return Err(Problem::slow_body(BODY_TIMEOUT, RATE_MIN_BYTES_PER_SECOND)),
            Ok(None) => return Ok((bytes.into(), permit)),
            Ok(Some(Err(error))) => {
                return Err(Problem::bad_body(
                    StatusCode::BAD_REQUEST,
                    format!("the body broke off: {error}"),
                ));
            }
            Ok(Some(Ok(frame))) => frame,
        };
        // Trailers are ignored.
        let Ok(chunk) = frame.into_data() else { continue };
        let needed = bytes.len().saturating_add(chunk.len());
        if needed > limit {
            return Err(Problem::body_too_long(limit));
        }
        if needed > bytes.capacity() {
            let grown = (bytes.capacity() * 2).max(INITIAL_CAPACITY).min(expected).max(needed);
            let paid = budget.reserve(source, grown).ok_or_else(Problem::body_memory_exhausted)?;
            let mut larger = Vec::with_capacity(grown);
            larger.extend_from_slice(&bytes);
            bytes = larger;
            // The former buffer is freed here, and its permit returns to the budget.
            permit = Some(paid);
        }
        bytes.extend_from_slice(&chunk);
    }
}

/// Returns when the next byte of a body must arrive, if `received` bytes have arrived.
fn next_byte_deadline(began: Instant, received: usize) -> Instant {
    let earned = Duration::from_millis(received as u64 * 1000 / RATE_MIN_BYTES_PER_SECOND);
    began + (RATE_GRACE + earned).min(BODY_TIMEOUT)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream;

    use super::*;

    const LIMIT: usize = 256 << 10;

    fn test_client_network() -> ClientNetwork {
        ClientNetwork::of_address([10, 0, 0, 1].into())
    }

    /// Returns a body whose chunks arrive with a pause before each.
    fn body_of_slow_chunks(chunks: usize, size: usize, pause: Duration) -> Body {
        Body::from_stream(stream::unfold(0, move |sent| async move {
            if sent == chunks {
                return None;
            }
            tokio::time::sleep(pause).await;
            Some((Ok::<_, Infallible>(Bytes::from(vec![b'x'; size])), sent + 1))
        }))
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_becomes_one_buffer_that_is_paid_for_until_the_permit_is_dropped() {
        let budget = Arc::new(BodyMemoryBudget::new(4 << 20));
        let body = body_of_slow_chunks(10_000, 1, Duration::from_micros(10));
        let (bytes, permit) = read_body(&budget, test_client_network(), body, LIMIT).await.unwrap();
        assert_eq!(bytes.len(), 10_000);
        assert_eq!(budget.used_bytes(), 16 << 10, "the buffer has doubled twice");
        drop(permit);
        assert_eq!(budget.used_bytes(), 0);
        let (bytes, permit) =
            read_body(&budget, test_client_network(), Body::from("abc"), LIMIT).await.unwrap();
        assert_eq!((&*bytes, permit.map(|permit| permit.bytes)), (&b"abc"[..], Some(3)));
        let (bytes, permit) = read_body(&budget, test_client_network(), Body::empty(), LIMIT).await.unwrap();
        assert!(bytes.is_empty() && permit.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_has_a_deadline_and_a_minimum_rate() {
        let budget = Arc::new(BodyMemoryBudget::default());
        let start = Instant::now();
        let refused = read_body(
            &budget,
            test_client_network(),
            body_of_slow_chunks(usize::MAX, 1, Duration::from_millis(500)),
            LIMIT,
        )
        .await;
        assert_eq!(refused.err().map(|problem| problem.status), Some(408));
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        let start = Instant::now();
        let fast = body_of_slow_chunks(usize::MAX, 2 << 10, Duration::from_millis(500));
        assert_eq!(
            read_body(&budget, test_client_network(), fast, LIMIT).await.err().map(|problem| problem.status),
            Some(408)
        );
        assert_eq!(start.elapsed(), BODY_TIMEOUT);
        assert_eq!(budget.used_bytes(), 0);
    }

    #[tokio::test]
    async fn one_source_leaves_room_for_the_others() {
        let budget = Arc::new(BodyMemoryBudget::new(64 << 10));
        let other = ClientNetwork::of_address([10, 0, 0, 2].into());
        let mut held = Vec::new();
        while let Some(permit) = budget.reserve(test_client_network(), 4 << 10) {
            held.push(permit);
        }
        assert_eq!(held.len(), 4, "a quarter");
        let refused = read_body(&budget, test_client_network(), Body::from("x"), LIMIT).await;
        assert_eq!(refused.err().map(|problem| problem.status), Some(503));
        assert!(read_body(&budget, other, Body::from("x"), LIMIT).await.is_ok());
        let long = Body::from(vec![0; LIMIT + 1]);
        assert_eq!(
            read_body(&budget, other, long, LIMIT).await.err().map(|problem| problem.status),
            Some(413)
        );
        let long = body_of_slow_chunks(usize::MAX, 16 << 10, Duration::ZERO);
        let refused = read_body(&budget, other, long, 8 << 10).await;
        assert_eq!(refused.err().map(|problem| problem.status), Some(413));
    }
}
