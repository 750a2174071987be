//! What the service is told of the engine: about once a second, and at the end.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tonic::Code;
use tonic::transport::Channel;

use super::Inner;
use crate::clock::Clock;
use crate::coordination::Timestamp;
use crate::proto::muster::v1::transfers_client::TransfersClient;
use crate::proto::muster::v1::{self as pb};
use crate::transfer::{Engine, Member, PrepareError, Stats, TransferError, registered_bytes};

/// How often it reports unless the service says otherwise.
const INTERVAL: Duration = Duration::from_secs(1);
/// The bounds of what the service may say.
const INTERVALS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
/// How long until it asks again a service that takes no reports.
const RARELY: Duration = Duration::from_secs(60);
const LIMIT: Duration = Duration::from_secs(5);
const FAILURES_MAX: usize = 64;
const PAIRS_MAX: usize = 16_384;
const CONNECTIONS_MAX: usize = 4096;

/// What is added up over the life of a worker.
#[derive(Debug, Default)]
pub(super) struct Tally {
    outcomes: BTreeMap<&'static str, u64>,
    failures: VecDeque<pb::Failure>,
    sequence: u64,
}

/// With whom a transfer failed, where its error says so.
fn peer_of(error: &TransferError) -> Option<Member> {
    match error {
        TransferError::PeerDead { member, .. }
        | TransferError::StaleIncarnation { member, .. }
        | TransferError::Integrity { member, .. }
        | TransferError::Transport { member, .. }
        | TransferError::Overloaded { member, .. } => Some(*member),
        TransferError::Prepare(error) => match &**error {
            PrepareError::Clique { member, .. } => Some(*member),
            _ => None,
        },
        _ => None,
    }
}

/// The connections that there are.
fn connections(engine: &Engine) -> Vec<pb::Connection> {
    let links = engine.links();
    let connections = links.iter().take(CONNECTIONS_MAX).map(|link| pb::Connection {
        peer: link.peer.task.0,
        peer_incarnation: link.peer.incarnation.get(),
        transport: link.kind.name().to_owned(),
        lanes: link.lanes as u32,
        launches: link.launched as u32,
    });
    connections.collect()
}

/// Bytes by peer and transport, since the life began.
fn pairs(engine: &Engine) -> Vec<pb::PairTotals> {
    let moved = engine.moved();
    let all = moved.iter().flat_map(|(peer, moved)| moved.iter().map(move |moved| (peer.0, moved)));
    let pairs = all.filter(|(_, (_, (sent, received)))| *sent > 0 || *received > 0).take(PAIRS_MAX).map(
        |(peer, (kind, (sent, received)))| pb::PairTotals {
            peer,
            transport: kind.name().to_owned(),
            sent_bytes: *sent,
            received_bytes: *received,
        },
    );
    pairs.collect()
}

impl Tally {
    /// Counts how a launch ended.
    pub fn count(&mut self, peer: u32, outcome: &Result<Stats, TransferError>) {
        let name = outcome.as_ref().map_or_else(TransferError::reason, |_| "completed");
        *self.outcomes.entry(name).or_default() += 1;
        let Err(error) = outcome else { return };
        if self.failures.len() == FAILURES_MAX {
            self.failures.pop_front();
        }
        self.failures.push_back(pb::Failure {
            at: Clock::start().now().since(Timestamp::default()).as_micros() as u64,
            peer: peer_of(error).map_or(peer, |member| member.task.0),
            reason: error.reason().to_owned(),
            text: crate::text::one_line(&error.to_string()).into_owned(),
        });
    }

    /// What is to be told now; the failures in it are told once.
    fn report(&mut self, engine: &Engine) -> pb::TransferReport {
        let (size, hits, misses, evictions) = engine.cliques();
        let counts = engine.counts();
        self.sequence += 1;
        pb::TransferReport {
            task: engine.here().task.0,
            incarnation: engine.here().incarnation.get(),
            sequence: self.sequence,
            pairs: pairs(engine),
            connections: connections(engine),
            outcomes: self
                .outcomes
                .iter()
                .map(|(outcome, launches)| pb::OutcomeTotals {
                    outcome: (*outcome).to_owned(),
                    launches: *launches,
                })
                .collect(),
            cliques: Some(pb::CliqueCache { size: size as u64, hits, misses, evictions }),
            totals: Some(pb::EngineTotals {
                fenced_frames: counts.fenced.load(Ordering::Relaxed),
                damaged_chunks: counts.damaged.load(Ordering::Relaxed),
                lanes_lost: counts.lanes_lost.load(Ordering::Relaxed),
                lanes_made: counts.lanes_made.load(Ordering::Relaxed),
                fetch_fallbacks: counts.fallbacks.load(Ordering::Relaxed),
                registered_bytes: registered_bytes(),
            }),
            failures: self.failures.drain(..).collect(),
        }
    }
}

pub(super) fn with<R>(tally: &Mutex<Tally>, act: impl FnOnce(&mut Tally) -> R) -> R {
    act(&mut tally.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Reports until the worker ends.
pub(super) async fn keep(inner: Arc<Inner>, channel: Channel) {
    loop {
        let pause = once(&inner, channel.clone()).await;
        let hurry = inner.hurry.notified();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // A failure is told soon, but a storm of them is one report.
            () = hurry => tokio::time::sleep(INTERVALS.0.min(pause)).await,
        }
    }
}

/// Reports once. When to do so again.
pub(super) async fn once(inner: &Inner, channel: Channel) -> Duration {
    let report = with(&inner.tally, |tally| tally.report(&inner.engine));
    let failures = report.failures.clone();
    let mut client = TransfersClient::new(channel);
    let why = match tokio::time::timeout(LIMIT, client.report(report)).await {
        Ok(Ok(answer)) => {
            let wanted = u64::from(answer.into_inner().interval_ms);
            return Duration::from_millis(wanted).clamp(INTERVALS.0, INTERVALS.1);
        }
        Ok(Err(status)) if status.code() == Code::Unimplemented => return RARELY,
        Ok(Err(status)) => status.to_string(),
        Err(_) => "no answer in time".to_owned(),
    };
    tracing::debug!(why, "a report of transfers was not taken");
    // What was not told is told the next time.
    with(&inner.tally, |tally| {
        for failure in failures.into_iter().rev() {
            if tally.failures.len() < FAILURES_MAX {
                tally.failures.push_front(failure);
            }
        }
    });
    INTERVAL
}
