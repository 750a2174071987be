//! Live updates: one stream of server-sent events for each open page.
//!
//! It renders nothing: pages give their parts. Begin at `LivePageQuery`, then `LiveHub`.
//!
//! One *hub* for each job that is being viewed, one for the overview and one for the audit take a new
//! snapshot: when an event reports a change, at most once in [`MIN_INTERVAL`] (longer if a snapshot is
//! costly), and otherwise once in [`REFRESH_INTERVAL`], for heartbeats and arrivals, which are no events. All
//! viewers share the snapshot and the parts made of it; parts with forms are made for one viewer. A page
//! lists in its address the digests of its parts and receives the parts that differ: whole the first time,
//! later as a line patch. So a reconnecting page is no special case. A hub ends with its last viewer.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::{self, Stream};
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{broadcast, watch};

use super::fragment::Fragment;
use super::frame::PageUser;
use super::overview::FleetSnapshot;
use super::patch::{PatchStep, patch};
use super::snapshot::JobSnapshot;
use super::task_table::TaskTableQuery;
use super::{audit, barriers, devices, drain, exclusions, job, keys, overview, task, timeline, transfers};
use crate::coordination::{JobId, TaskId};
use crate::engine::NumberedEvent;
use crate::http::events::StreamGuard;
use crate::http::extract::{JobPath, QueryParams};
use crate::http::{AppState, ClientNetwork, Problem};

/// The minimum time between two snapshots.
const MIN_INTERVAL: Duration = Duration::from_millis(150);
/// The upper limit of that time for costly snapshots.
const MAX_INTERVAL: Duration = Duration::from_millis(400);
/// Snapshots may take one part in this many of the time.
const CAPTURE_SHARE: u32 = 50;
/// The time between two snapshots if no event comes.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);
/// The time between two messages that show a page that its stream is alive.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// The maximum number of digests in a page's address.
const KNOWN_FRAGMENTS_MAX: usize = 32;

/// The subject of a hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum HubSubject {
    All,
    Audit,
    Job(JobId),
}

/// The snapshot of a hub.
enum HubView {
    All(Box<FleetSnapshot>, Mutex<Option<Arc<Vec<Fragment>>>>),
    Audit,
    Job(Box<JobSnapshot>),
}

struct VersionedView {
    version: u64,
    seen: HubView,
}

type HubValue = Option<Arc<VersionedView>>;

/// The running hubs.
#[derive(Default)]
pub struct LiveHubs {
    hubs: Mutex<HashMap<HubSubject, Arc<watch::Sender<HubValue>>>>,
}

impl LiveHubs {
    /// Subscribes to a hub. Starts the hub if it is not running.
    fn join(&self, site: &AppState, subject: HubSubject) -> watch::Receiver<HubValue> {
        let mut hubs = self.hubs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hub) = hubs.get(&subject) {
            return hub.subscribe();
        }
        let (news, joined) = watch::channel(None);
        let news = Arc::new(news);
        hubs.insert(subject, Arc::clone(&news));
        tokio::spawn(LiveHub::new(site.clone(), subject, news).run());
        joined
    }

    /// Removes a hub if it has no viewer. Returns whether it was removed.
    fn remove_unused(&self, subject: HubSubject, news: &watch::Sender<HubValue>) -> bool {
        let mut hubs = self.hubs.lock().unwrap_or_else(PoisonError::into_inner);
        let left = news.receiver_count() == 0;
        if left {
            hubs.remove(&subject);
        }
        left
    }
}

struct LiveHub {
    site: AppState,
    subject: HubSubject,
    news: Arc<watch::Sender<HubValue>>,
    events: broadcast::Receiver<NumberedEvent>,
    acts: watch::Receiver<u64>,
    version: u64,
}

impl LiveHub {
    fn new(site: AppState, subject: HubSubject, news: Arc<watch::Sender<HubValue>>) -> Self {
        let events = site.engine.follow(u64::MAX).1;
        let acts = site.operations.audit.subscribe();
        Self { site, subject, news, events, acts, version: 0 }
    }

    async fn run(mut self) {
        loop {
            // The snapshot below covers the events so far.
            while !matches!(self.events.try_recv(), Err(TryRecvError::Empty | TryRecvError::Closed)) {}
            let began = self.site.engine.clock().now();
            let seen = self.capture();
            let gone = seen.is_none();
            self.version += 1;
            self.news.send_replace(seen.map(|seen| Arc::new(VersionedView { version: self.version, seen })));
            if gone {
                break;
            }
            let took = self.site.engine.clock().now().since(began);
            let pace = tokio::time::sleep((took * CAPTURE_SHARE).clamp(MIN_INTERVAL, MAX_INTERVAL));
            let news = Arc::clone(&self.news);
            tokio::select! {
                () = news.closed() => if self.site.live.remove_unused(self.subject, &news) { return },
                () = self.wait_for_change() => pace.await,
                () = tokio::time::sleep(REFRESH_INTERVAL) => {}
            }
        }
        // The job is deleted: the end of their streams tells the viewers.
        let mut hubs = self.site.live.hubs.lock().unwrap_or_else(PoisonError::into_inner);
        hubs.remove(&self.subject);
    }

    fn capture(&mut self) -> Option<HubView> {
        match self.subject {
            HubSubject::All => {
                Some(HubView::All(Box::new(FleetSnapshot::capture(&self.site)), Mutex::default()))
            }
            HubSubject::Audit => Some(HubView::Audit),
            HubSubject::Job(job) => Some(HubView::Job(Box::new(JobSnapshot::capture(&self.site, job)?))),
        }
    }

    /// Waits until the subject of the hub changes or the refresh interval is over.
    async fn wait_for_change(&mut self) {
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

/// The query parameters of a live stream.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct LivePageQuery {
    /// The page.
    page: String,
    /// The digests of the parts that the page has: `id:digest,…`.
    have: String,
    task: String,
    fate: String,
    prefix: String,
    after: String,
    transport: String,
    state: String,
    find: String,
    sort: String,
    down: String,
    /// The page of the table; the name `page` is taken.
    rows: String,
    job: String,
    outcome: String,
}

impl LivePageQuery {
    fn listing(&self) -> TaskTableQuery {
        let Self { state, find, sort, down, rows, .. } = self.clone();
        TaskTableQuery { state, find, sort, down, page: rows }
    }

    fn parts(
        &self,
        site: &AppState,
        guest: &PageUser,
        snapshot: &VersionedView,
    ) -> Result<Arc<Vec<Fragment>>, Problem> {
        let scene = match &snapshot.seen {
            HubView::Job(scene) => scene,
            HubView::Audit => {
                let which = audit::AuditPageQuery { job: self.job.clone(), outcome: self.outcome.clone() };
                return audit::parts(site, &which).map(Arc::new);
            }
            HubView::All(survey, made) => {
                let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(parts) = made.as_ref() {
                    return Ok(Arc::clone(parts));
                }
                let parts = Arc::new(overview::parts(survey)?);
                return Ok(Arc::clone(made.insert(parts)));
            }
        };
        let task = self.task.parse().ok().map(TaskId);
        match self.page.as_str() {
            "job" => {
                let listing = self.listing();
                scene.cached_parts(&format!("job?{}", listing.query()), || job::parts(scene, &listing))
            }
            "transfers" => {
                let choice =
                    transfers::PairFilter { task: self.task.clone(), transport: self.transport.clone() };
                scene.cached_parts(&format!("transfers?{}", choice.query()), || {
                    transfers::parts(scene, &choice)
                })
            }
            "devices" => {
                let which = devices::DevicesPageQuery { task: self.task.clone(), fate: self.fate.clone() };
                devices::parts(site, scene, guest, &which).map(Arc::new)
            }
            "keys" => {
                let which = keys::KeysPageQuery { prefix: self.prefix.clone(), after: self.after.clone() };
                keys::parts(site, scene, &which)
            }
            "barriers" => scene.cached_parts("barriers", || barriers::parts(scene)),
            "timeline" => scene.cached_parts(&format!("timeline/{task:?}"), || {
                Ok(vec![job::head(scene)?, timeline::fragment(scene, true, task)?])
            }),
            // Parts with forms are made for one user and not shared.
            "drain" => drain::parts(scene, guest, drain::DrainForm::default()).map(Arc::new),
            "exclusions" => exclusions::parts(site, scene, guest).map(Arc::new),
            "task" => {
                let parts = task::parts(site, scene, guest, task.unwrap_or(TaskId(-1)))?;
                Ok(Arc::new(parts.unwrap_or_default()))
            }
            _ => scene.cached_parts("head", || Ok(vec![job::head(scene)?])),
        }
    }
}

/// One page that follows updates.
struct LivePage {
    site: AppState,
    news: watch::Receiver<HubValue>,
    query: LivePageQuery,
    user: PageUser,
    have: BTreeMap<String, String>,
    /// The parts that this stream has sent, whose text the page has.
    sent: BTreeMap<&'static str, Fragment>,
    stop: watch::Receiver<bool>,
    _slot: StreamGuard,
}

impl LivePage {
    fn new(
        site: &AppState,
        source: ClientNetwork,
        subject: HubSubject,
        guest: PageUser,
        which: LivePageQuery,
    ) -> Result<Self, Problem> {
        let (slot, stop) = site.streams.acquire(source)?;
        let mut news = site.live.join(site, subject);
        // The present snapshot is new to a viewer that joins now.
        news.mark_changed();
        let pairs = which.have.split(',').take(KNOWN_FRAGMENTS_MAX).filter_map(|pair| pair.split_once(':'));
        let have = pairs.map(|(id, tag)| (id.to_owned(), tag.to_owned())).collect();
        Ok(Self {
            site: site.clone(),
            news,
            query: which,
            user: guest,
            have,
            sent: BTreeMap::new(),
            stop,
            _slot: slot,
        })
    }

    fn stream(self) -> impl Stream<Item = Result<Event, Infallible>> {
        stream::unfold(self, |mut viewer| async move {
            let event = viewer.next().await?;
            Some((Ok(event), viewer))
        })
    }

    /// Returns the next message; `None` at the end of the stream.
    async fn next(&mut self) -> Option<Event> {
        loop {
            tokio::select! {
                biased;
                // A dropped sender means the same as the stop signal.
                _ = self.stop.wait_for(|stop| *stop) => return None,
                changed = self.news.changed() => changed.ok()?,
                () = tokio::time::sleep(KEEP_ALIVE_INTERVAL) => return Some(sse_event(&self.site, "tick", &[])),
            }
            let news = self.news.borrow_and_update().clone();
            let Some(snapshot) = news else { continue };
            let parts = self.query.parts(&self.site, &self.user, &snapshot).ok()?;
            let fresh: Vec<&Fragment> =
                parts.iter().filter(|part| self.have.get(part.id) != Some(&part.tag())).collect();
            if fresh.is_empty() {
                continue;
            }
            let news: Vec<_> =
                fresh.iter().map(|part| FragmentUpdate::of(part, self.sent.get(part.id))).collect();
            let event = sse_event(&self.site, "parts", &news).id(snapshot.version.to_string());
            for part in fresh {
                self.have.insert(part.id.to_owned(), part.tag());
                self.sent.insert(part.id, part.clone());
            }
            return Some(event);
        }
    }
}

/// An update of a part: its name, its digest, and its text or the patch of the former text.
#[derive(Serialize)]
#[serde(untagged)]
enum FragmentUpdate<'a> {
    Whole(&'static str, String, &'a str),
    Changed(&'static str, String, Vec<PatchStep<'a>>),
}

impl<'a> FragmentUpdate<'a> {
    fn of(part: &'a Fragment, sent: Option<&Fragment>) -> Self {
        match sent.and_then(|sent| patch(&sent.html, &part.html)) {
            Some(steps) => Self::Changed(part.id, part.tag(), steps),
            None => Self::Whole(part.id, part.tag(), &part.html),
        }
    }
}

fn sse_event(site: &AppState, kind: &str, parts: &[FragmentUpdate<'_>]) -> Event {
    let data = serde_json::json!({ "now": site.engine.clock().now().0, "parts": parts }).to_string();
    Event::default().event(kind).data(data)
}

/// Serves `GET /live`.
pub(super) async fn overview(
    State(site): State<AppState>,
    guest: PageUser,
    source: ClientNetwork,
    QueryParams(which): QueryParams<LivePageQuery>,
) -> Result<Response, Problem> {
    let subject = if which.page == "audit" { HubSubject::Audit } else { HubSubject::All };
    Ok(Sse::new(LivePage::new(&site, source, subject, guest, which)?.stream()).into_response())
}

/// Serves `GET /jobs/{job}/live`.
pub(super) async fn job(
    State(site): State<AppState>,
    job: JobPath,
    guest: PageUser,
    source: ClientNetwork,
    QueryParams(which): QueryParams<LivePageQuery>,
) -> Result<Response, Problem> {
    Ok(Sse::new(LivePage::new(&site, source, HubSubject::Job(job.id), guest, which)?.stream())
        .into_response())
}
