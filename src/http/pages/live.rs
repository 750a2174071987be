//! Live updates: one stream of server-sent events for each open page.
//!
//! `job_page_fragments.rs` calls the pages, which render their fragments. Begin at `LiveHub`, then `LivePageStream`.
//!
//! Each viewed job, the overview and the audit have one *hub*, which takes snapshots for all viewers. When an event
//! or an audit line reports a change, the hub takes a new snapshot. The time between two snapshots is at least
//! [`MIN_INTERVAL`], and longer if snapshots are costly. Without such a report, the hub takes a snapshot every
//! [`REFRESH_INTERVAL`], because heartbeats and arrivals cause no events. A new viewer is a reason for a snapshot, too:
//! an earlier one can be older than the page that the viewer has just loaded. A hub ends with its last viewer.
//!
//! Most rendered fragments are shared by all viewers. These are rendered for each viewer: the pages with forms, the
//! audit page, on the page of devices the fragment that shows values of keys, and on the overview the first steps,
//! which name the server as the viewer reached it.
//!
//! When a page opens the stream, the URL lists the digests of the fragments that the page has. The page receives
//! the fragments that differ, first as a whole, and later as line patches if these are shorter. A page that
//! reconnects therefore needs no special case.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::{self, Stream};
use serde::Serialize;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{Notify, broadcast, watch};

use super::fragment::Fragment;
use super::fragment_patch::{PatchStep, compute_line_patch};
use super::frame::PageUser;
use super::job_page_fragments::render_job_page_fragments;
use super::live_page::{LivePage, LiveStreamQuery};
use super::overview::FleetSnapshot;
use super::snapshot::JobSnapshot;
use super::{audit, overview};
use crate::coordination::{JobId, Timestamp};
use crate::engine::NumberedEvent;
use crate::http::event_stream_limiter::EventStreamGuard;
use crate::http::extractors::{JobPath, QueryParams};
use crate::http::{AppState, ClientNetwork, Problem};

/// The minimum time between two snapshots.
const MIN_INTERVAL: Duration = Duration::from_millis(150);
/// The upper limit of that time for costly snapshots.
const MAX_INTERVAL: Duration = Duration::from_secs(4);
/// The time between two snapshots if no event comes. It is longer if snapshots are costly.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);
/// Snapshots may take one part in this many of the time. Their viewers then take about as much.
const CAPTURE_SHARE: u32 = 50;
/// The time between two messages that show a page that its stream is alive.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// The maximum number of digests in a page's address.
const KNOWN_FRAGMENTS_MAX: usize = 32;

/// Returns the minimum time from a snapshot that took this long to the next one.
fn interval_after_capture(took: Duration) -> Duration {
    took.saturating_mul(CAPTURE_SHARE).clamp(MIN_INTERVAL, MAX_INTERVAL)
}

/// The subject of a hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum HubSubject {
    All,
    Audit,
    Job(JobId),
}

/// The snapshot of a hub.
enum HubSnapshot {
    All(Box<FleetSnapshot>, Mutex<Option<Arc<Vec<Fragment>>>>),
    Audit,
    Job(Box<JobSnapshot>),
}

struct VersionedSnapshot {
    version: u64,
    /// The time at which it was begun.
    taken_at: Timestamp,
    seen: HubSnapshot,
}

type LatestSnapshot = Option<Arc<VersionedSnapshot>>;

/// The shared state of a hub and its viewers.
struct HubChannel {
    latest: watch::Sender<LatestSnapshot>,
    /// Notified by each new viewer, which needs a new snapshot.
    joined: Notify,
}

/// The running hubs, which the streams of a router share.
#[derive(Default)]
pub(super) struct LiveHubs {
    hubs: Mutex<HashMap<HubSubject, Arc<HubChannel>>>,
}

impl LiveHubs {
    /// Subscribes to a hub. Starts the hub if it is not running.
    fn subscribe_or_start_hub(
        self: &Arc<Self>,
        site: &AppState,
        subject: HubSubject,
    ) -> watch::Receiver<LatestSnapshot> {
        let mut hubs = self.hubs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hub) = hubs.get(&subject) {
            hub.joined.notify_one();
            return hub.latest.subscribe();
        }
        let (latest, viewer) = watch::channel(None);
        let channel = Arc::new(HubChannel { latest, joined: Notify::new() });
        hubs.insert(subject, Arc::clone(&channel));
        tokio::spawn(
            LiveHub::new(Arc::clone(self), site.clone(), subject, channel).publish_snapshots_until_unviewed(),
        );
        viewer
    }

    /// Removes a hub if it has no viewer. Returns whether it was removed.
    fn remove_hub_without_viewers(&self, subject: HubSubject, channel: &HubChannel) -> bool {
        let mut hubs = self.hubs.lock().unwrap_or_else(PoisonError::into_inner);
        let left = channel.latest.receiver_count() == 0;
        if left {
            hubs.remove(&subject);
        }
        left
    }
}

struct LiveHub {
    hubs: Arc<LiveHubs>,
    site: AppState,
    subject: HubSubject,
    channel: Arc<HubChannel>,
    events: broadcast::Receiver<NumberedEvent>,
    acts: watch::Receiver<u64>,
    version: u64,
}

impl LiveHub {
    fn new(hubs: Arc<LiveHubs>, site: AppState, subject: HubSubject, channel: Arc<HubChannel>) -> Self {
        let events = site.engine.subscribe_events(u64::MAX).1;
        let acts = site.operations.audit.subscribe_to_line_count();
        Self { hubs, site, subject, channel, events, acts, version: 0 }
    }

    async fn publish_snapshots_until_unviewed(mut self) {
        let mut took_before = Duration::MAX;
        loop {
            // The snapshot below covers the events so far.
            while !matches!(self.events.try_recv(), Err(TryRecvError::Empty | TryRecvError::Closed)) {}
            let taken_at = self.site.engine.clock().now();
            let seen = self.capture_snapshot();
            let gone = seen.is_none();
            self.version += 1;
            let version = self.version;
            self.channel
                .latest
                .send_replace(seen.map(|seen| Arc::new(VersionedSnapshot { version, taken_at, seen })));
            if gone {
                break;
            }
            let took = self.site.engine.clock().now().since(taken_at);
            // A snapshot that took long once, because its thread had to wait for a processor, does not count.
            let interval = interval_after_capture(took.min(took_before));
            let pace = tokio::time::sleep(interval);
            took_before = took;
            let channel = Arc::clone(&self.channel);
            tokio::select! {
                () = channel.latest.closed() => if self.hubs.remove_hub_without_viewers(self.subject, &channel) { return },
                () = channel.joined.notified() => pace.await,
                () = self.wait_for_change_of_subject() => pace.await,
                () = tokio::time::sleep(REFRESH_INTERVAL.max(interval)) => {}
            }
        }
        // The job is deleted: the end of their streams tells the viewers.
        let mut hubs = self.hubs.hubs.lock().unwrap_or_else(PoisonError::into_inner);
        hubs.remove(&self.subject);
    }

    fn capture_snapshot(&mut self) -> Option<HubSnapshot> {
        match self.subject {
            HubSubject::All => {
                Some(HubSnapshot::All(Box::new(FleetSnapshot::capture(&self.site)), Mutex::default()))
            }
            HubSubject::Audit => Some(HubSnapshot::Audit),
            HubSubject::Job(job) => Some(HubSnapshot::Job(Box::new(JobSnapshot::capture(&self.site, job)?))),
        }
    }

    /// Waits until the subject of the hub changes.
    async fn wait_for_change_of_subject(&mut self) {
        if self.subject == HubSubject::Audit {
            let grown = self.acts.changed().await;
            return if grown.is_err() {
                std::future::pending().await
            };
        }
        loop {
            match self.events.recv().await {
                Ok(numbered) => match self.subject {
                    HubSubject::Job(job) if numbered.event.job != job => {}
                    _ => return,
                },
                Err(RecvError::Lagged(_)) => return,
                Err(RecvError::Closed) => std::future::pending().await,
            }
        }
    }
}

/// One page that follows updates, as one viewer sees it.
struct LivePageStream {
    site: AppState,
    news: watch::Receiver<LatestSnapshot>,
    /// The time at which the viewer joined. Earlier snapshots can be older than the page.
    since: Timestamp,
    page: LivePage,
    user: PageUser,
    have: BTreeMap<String, String>,
    /// The fragments that this stream has sent, whose text the page has.
    sent: BTreeMap<&'static str, Fragment>,
    stop: watch::Receiver<bool>,
    _slot: EventStreamGuard,
}

impl LivePageStream {
    fn new(
        hubs: &Arc<LiveHubs>,
        site: &AppState,
        source: ClientNetwork,
        subject: HubSubject,
        guest: PageUser,
        which: LiveStreamQuery,
    ) -> Result<Self, Problem> {
        let (slot, stop) = site.streams.reserve_event_stream(source)?;
        let since = site.engine.clock().now();
        let news = hubs.subscribe_or_start_hub(site, subject);
        let pairs = which.have.split(',').take(KNOWN_FRAGMENTS_MAX).filter_map(|pair| pair.split_once(':'));
        let have = pairs.map(|(id, tag)| (id.to_owned(), tag.to_owned())).collect();
        Ok(Self {
            site: site.clone(),
            news,
            since,
            page: which.page.unwrap_or(LivePage::Head),
            user: guest,
            have,
            sent: BTreeMap::new(),
            stop,
            _slot: slot,
        })
    }

    /// Returns the fragments of the page in this snapshot.
    fn render_fragments(&self, snapshot: &VersionedSnapshot) -> Result<Arc<Vec<Fragment>>, Problem> {
        match &snapshot.seen {
            HubSnapshot::Job(snapshot) => {
                render_job_page_fragments(&self.page, &self.site, snapshot, &self.user)
            }
            HubSnapshot::Audit => {
                let LivePage::Audit(which) = &self.page else { return Err(Problem::internal_error()) };
                audit::render_fragments(&self.site, which).map(Arc::new)
            }
            HubSnapshot::All(survey, made) => {
                let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
                let shared = match made.as_ref() {
                    Some(parts) => Arc::clone(parts),
                    None => Arc::clone(made.insert(Arc::new(overview::render_fragments(survey)?))),
                };
                drop(made);
                overview::render_fragments_for_host(&shared, survey, self.user.host.as_deref())
            }
        }
    }

    fn into_stream(self) -> impl Stream<Item = Result<Event, Infallible>> {
        stream::unfold(self, |mut viewer| async move {
            let event = viewer.next_message().await?;
            Some((Ok(event), viewer))
        })
    }

    /// Returns the next message; `None` at the end of the stream.
    async fn next_message(&mut self) -> Option<Event> {
        loop {
            tokio::select! {
                biased;
                // A dropped sender means the same as the stop signal.
                _ = self.stop.wait_for(|stop| *stop) => return None,
                changed = self.news.changed() => changed.ok()?,
                () = tokio::time::sleep(KEEP_ALIVE_INTERVAL) => return Some(live_update_sse_event(&self.site, "tick", &[])),
            }
            let news = self.news.borrow_and_update().clone();
            let Some(snapshot) = news.filter(|snapshot| snapshot.taken_at >= self.since) else { continue };
            let parts = self.render_fragments(&snapshot).ok()?;
            let fresh: Vec<&Fragment> =
                parts.iter().filter(|part| self.have.get(part.id) != Some(&part.digest_text())).collect();
            if fresh.is_empty() {
                continue;
            }
            let news: Vec<_> =
                fresh.iter().map(|part| FragmentUpdate::new(part, self.sent.get(part.id))).collect();
            let event = live_update_sse_event(&self.site, "parts", &news).id(snapshot.version.to_string());
            for part in fresh {
                self.have.insert(part.id.to_owned(), part.digest_text());
                self.sent.insert(part.id, part.clone());
            }
            return Some(event);
        }
    }
}

/// An update of a fragment: its name, its digest, and its text or the patch of the former text.
#[derive(Serialize)]
#[serde(untagged)]
enum FragmentUpdate<'a> {
    Whole(&'static str, String, &'a str),
    Changed(&'static str, String, Vec<PatchStep<'a>>),
}

impl<'a> FragmentUpdate<'a> {
    fn new(part: &'a Fragment, sent: Option<&Fragment>) -> Self {
        match sent.and_then(|sent| compute_line_patch(&sent.html, &part.html)) {
            Some(steps) => Self::Changed(part.id, part.digest_text(), steps),
            None => Self::Whole(part.id, part.digest_text(), &part.html),
        }
    }
}

fn live_update_sse_event(site: &AppState, kind: &str, parts: &[FragmentUpdate<'_>]) -> Event {
    let data = serde_json::json!({ "now": site.engine.clock().now().0, "parts": parts }).to_string();
    Event::default().event(kind).data(data)
}

/// Serves `GET /live`.
pub(super) async fn stream_overview_or_audit_updates(
    State(site): State<AppState>,
    Extension(hubs): Extension<Arc<LiveHubs>>,
    guest: PageUser,
    source: ClientNetwork,
    QueryParams(which): QueryParams<LiveStreamQuery>,
) -> Result<Response, Problem> {
    let subject = match which.page {
        Some(LivePage::Audit(_)) => HubSubject::Audit,
        _ => HubSubject::All,
    };
    Ok(Sse::new(LivePageStream::new(&hubs, &site, source, subject, guest, which)?.into_stream())
        .into_response())
}

/// Serves `GET /jobs/{job}/live`.
pub(super) async fn stream_job_page_updates(
    State(site): State<AppState>,
    Extension(hubs): Extension<Arc<LiveHubs>>,
    job: JobPath,
    guest: PageUser,
    source: ClientNetwork,
    QueryParams(which): QueryParams<LiveStreamQuery>,
) -> Result<Response, Problem> {
    Ok(Sse::new(
        LivePageStream::new(&hubs, &site, source, HubSubject::Job(job.id), guest, which)?.into_stream(),
    )
    .into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costly_snapshots_are_rarer_within_a_limit() {
        let after_ms = |ms| interval_after_capture(Duration::from_millis(ms));
        assert_eq!(after_ms(0), MIN_INTERVAL);
        // Snapshots of ten thousand tasks take a fiftieth of the time at most.
        assert_eq!(after_ms(20), Duration::from_secs(1));
        assert_eq!(after_ms(1_000), MAX_INTERVAL);
    }
}
