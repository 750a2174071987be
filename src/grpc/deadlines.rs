//! The deadlines of one connection and of its calls. One timer serves all of them.
//!
//! `call_table.rs` ends the calls whose deadlines have passed, and `connection.rs` ends the connection. Begin at
//! [`SlotDeadlines::poll_expired`].

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::time::{Instant, Sleep, sleep_until};

/// The deadlines of slots. Most calls end before their deadlines; such deadlines are removed in bulk.
#[derive(Default)]
pub(super) struct SlotDeadlines {
    all: BinaryHeap<Reverse<(Instant, u64)>>,
    timer: Option<Pin<Box<Sleep>>>,
}

/// The number of dead deadlines up to which none is removed.
const DEAD_DEADLINES_MAX: usize = 64;

impl SlotDeadlines {
    /// Adds a deadline.
    pub(super) fn add(&mut self, at: Instant, slot: u64) {
        self.all.push(Reverse((at, slot)));
    }

    /// Removes deadlines of slots that no longer exist, if there are many compared to the `live` ones.
    pub(super) fn sweep_removed_slots(&mut self, live: usize, mut is_live: impl FnMut(u64) -> bool) {
        if self.all.len() > 4 * live + DEAD_DEADLINES_MAX {
            self.all.retain(|Reverse((_, slot))| is_live(*slot));
            self.all.shrink_to(2 * self.all.len() + DEAD_DEADLINES_MAX);
        }
    }

    /// Returns the next slot whose deadline has passed, and the present time.
    pub(super) fn poll_expired(&mut self, cx: &mut Context<'_>) -> Poll<(u64, Instant)> {
        let Some(&Reverse((at, slot))) = self.all.peek() else {
            self.timer = None;
            return Poll::Pending;
        };
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if timer.deadline() != at {
            timer.as_mut().reset(at);
        }
        if timer.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.all.pop();
        Poll::Ready((slot, Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn deadlines_come_in_order_and_the_dead_are_swept_out() {
        let start = Instant::now();
        let mut deadlines = SlotDeadlines::default();
        for slot in (0..100).rev() {
            deadlines.add(start + Duration::from_secs(slot), slot);
        }
        deadlines.sweep_removed_slots(0, |slot| slot % 2 == 1);
        for expected in (1..100).step_by(2) {
            let (slot, now) = std::future::poll_fn(|cx| deadlines.poll_expired(cx)).await;
            assert_eq!(slot, expected);
            assert!(now >= start + Duration::from_secs(slot));
        }
        assert!(deadlines.timer.is_some());
        let mut cx = Context::from_waker(std::task::Waker::noop());
        assert!(deadlines.poll_expired(&mut cx).is_pending());
        assert!(deadlines.timer.is_none());
    }
}
