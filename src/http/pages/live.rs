//! Live updates: one stream of server-sent events for each open page.
//!
//! It renders nothing: pages give their parts. Begin at `Which`, then `Hub`.
//!
//! One *hub* for each job that is being viewed, one for the overview and one for the audit take a new snapshot:
//! when an event says that something changed, at most once in [`PACE`] (longer if a snapshot is costly), and
//! otherwise once in [`FRESHEN`], for heartbeats and arrivals, which are no events. All viewers share the snapshot
//! and the parts made of it; parts with forms are made for one viewer. A page says in its address which parts it
//! has, by digest, and receives those that differ: whole the first time, later as a line patch. So a reconnecting
//! page is no special case. A hub ends with its last viewer.

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

use super::overview::Survey;
use super::part::Part;
use super::patch::{Step, patch};
use super::scene::Scene;
use super::shell::Guest;
use super::table::Listing;
use super::{audit, barriers, devices, drain, exclusions, job, keys, overview, task, timeline, transfers};
use crate::coordination::{JobId, TaskId};
use crate::engine::Numbered;
use crate::http::events::StreamGuard;
use crate::http::extract::{Job, Params};
use crate::http::{Problem, Site, Source};

/// The least time between two looks.
const PACE: Duration = Duration::from_millis(150);
/// The most that a costly look may stretch it to.
const PACE_MAX: Duration = Duration::from_millis(400);
/// A look may take one part in so many of the time.
const LOOKS_PART: u32 = 50;
/// How often to look if nothing happens.
const FRESHEN: Duration = Duration::from_secs(2);
/// How often a page is told that it is still followed.
const TICK: Duration = Duration::from_secs(10);
/// How long the list of what a page has may be.
const HAVE_MAX: usize = 32;

/// What a hub looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Subject {
    All,
    Audit,
    Job(JobId),
}

/// What a hub saw.
enum Seen {
    All(Box<Survey>, Mutex<Option<Arc<Vec<Part>>>>),
    Audit,
    Job(Box<Scene>),
}

struct Snapshot {
    version: u64,
    seen: Seen,
}

type Sight = Option<Arc<Snapshot>>;

/// The hubs that there are.
#[derive(Default)]
pub struct Live {
    hubs: Mutex<HashMap<Subject, Arc<watch::Sender<Sight>>>>,
}

impl Live {
    /// Joins a hub; starts it if it is not there.
    fn join(&self, site: &Site, subject: Subject) -> watch::Receiver<Sight> {
        let mut hubs = self.hubs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hub) = hubs.get(&subject) {
            return hub.subscribe();
        }
        let (news, joined) = watch::channel(None);
        let news = Arc::new(news);
        hubs.insert(subject, Arc::clone(&news));
        tokio::spawn(Hub::new(site.clone(), subject, news).run());
        joined
    }

    /// Takes a hub away if nobody looks any more.
    fn part_with(&self, subject: Subject, news: &watch::Sender<Sight>) -> bool {
        let mut hubs = self.hubs.lock().unwrap_or_else(PoisonError::into_inner);
        let left = news.receiver_count() == 0;
        if left {
            hubs.remove(&subject);
        }
        left
    }
}

struct Hub {
    site: Site,
    subject: Subject,
    news: Arc<watch::Sender<Sight>>,
    events: broadcast::Receiver<Numbered>,
    acts: watch::Receiver<u64>,
    version: u64,
}

impl Hub {
    fn new(site: Site, subject: Subject, news: Arc<watch::Sender<Sight>>) -> Self {
        let events = site.engine.follow(u64::MAX).1;
        let acts = site.audit.follow();
        Self { site, subject, news, events, acts, version: 0 }
    }

    async fn run(mut self) {
        loop {
            // What has happened until now is seen now.
            while !matches!(self.events.try_recv(), Err(TryRecvError::Empty | TryRecvError::Closed)) {}
            let began = self.site.engine.clock().now();
            let seen = self.look();
            let gone = seen.is_none();
            self.version += 1;
            self.news.send_replace(seen.map(|seen| Arc::new(Snapshot { version: self.version, seen })));
            if gone {
                break;
            }
            let took = self.site.engine.clock().now().since(began);
            let pace = tokio::time::sleep((took * LOOKS_PART).clamp(PACE, PACE_MAX));
            let news = Arc::clone(&self.news);
            tokio::select! {
                () = news.closed() => if self.site.live.part_with(self.subject, &news) { return },
                () = self.something() => pace.await,
                () = tokio::time::sleep(FRESHEN) => {}
            }
        }
        // The job is gone: whoever looks is told by the end of the stream.
        let mut hubs = self.site.live.hubs.lock().unwrap_or_else(PoisonError::into_inner);
        hubs.remove(&self.subject);
    }

    fn look(&mut self) -> Option<Seen> {
        match self.subject {
            Subject::All => Some(Seen::All(Box::new(Survey::see(&self.site)), Mutex::default())),
            Subject::Audit => Some(Seen::Audit),
            Subject::Job(job) => Some(Seen::Job(Box::new(Scene::see(&self.site, job)?))),
        }
    }

    /// Until something happens to what the hub looks at.
    async fn something(&mut self) {
        if self.subject == Subject::Audit {
            let grown = self.acts.changed().await;
            return if grown.is_err() {
                std::future::pending().await
            };
        }
        loop {
            match self.events.recv().await {
                Ok(numbered) => match self.subject {
                    Subject::Job(job) if numbered.event.job != job => {}
                    _ => return,
                },
                Err(RecvError::Lagged(_)) => return,
                Err(RecvError::Closed) => std::future::pending().await,
            }
        }
    }
}

/// What a page follows.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct Which {
    /// Which page.
    page: String,
    /// The digests of the parts that it has: `id:digest,…`.
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
    /// Which page of the table; a name of its own, since `page` is taken.
    rows: String,
    job: String,
    outcome: String,
}

impl Which {
    fn listing(&self) -> Listing {
        let Self { state, find, sort, down, rows, .. } = self.clone();
        Listing { state, find, sort, down, page: rows }
    }

    fn parts(&self, site: &Site, guest: &Guest, snapshot: &Snapshot) -> Result<Arc<Vec<Part>>, Problem> {
        let scene = match &snapshot.seen {
            Seen::Job(scene) => scene,
            Seen::Audit => {
                let which = audit::Which { job: self.job.clone(), outcome: self.outcome.clone() };
                return audit::parts(site, &which).map(Arc::new);
            }
            Seen::All(survey, made) => {
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
                scene.made(&format!("job?{}", listing.query()), || job::parts(scene, &listing))
            }
            "transfers" => {
                let choice = transfers::Choice { task: self.task.clone(), transport: self.transport.clone() };
                scene.made(&format!("transfers?{}", choice.query()), || transfers::parts(scene, &choice))
            }
            "devices" => {
                let which = devices::Which { task: self.task.clone(), fate: self.fate.clone() };
                devices::parts(site, scene, guest, &which).map(Arc::new)
            }
            "keys" => {
                let which = keys::Which { prefix: self.prefix.clone(), after: self.after.clone() };
                keys::parts(site, scene, &which)
            }
            "barriers" => scene.made("barriers", || barriers::parts(scene)),
            "timeline" => scene.made(&format!("timeline/{task:?}"), || {
                Ok(vec![job::head(scene)?, timeline::part(scene, true, task)?])
            }),
            // Forms are made for one guest: these are shared with nobody.
            "drain" => drain::parts(scene, guest, drain::Form::default()).map(Arc::new),
            "exclusions" => exclusions::parts(site, scene, guest).map(Arc::new),
            "task" => {
                let parts = task::parts(site, scene, guest, task.unwrap_or(TaskId(-1)))?;
                Ok(Arc::new(parts.unwrap_or_default()))
            }
            _ => scene.made("head", || Ok(vec![job::head(scene)?])),
        }
    }
}

/// One page that follows.
struct Viewer {
    site: Site,
    news: watch::Receiver<Sight>,
    which: Which,
    guest: Guest,
    have: BTreeMap<String, String>,
    /// The parts that it was sent by this stream, whose text it has.
    sent: BTreeMap<&'static str, Part>,
    stop: watch::Receiver<bool>,
    _slot: StreamGuard,
}

impl Viewer {
    fn new(
        site: &Site,
        source: Source,
        subject: Subject,
        guest: Guest,
        which: Which,
    ) -> Result<Self, Problem> {
        let (slot, stop) = site.streams.enter(source)?;
        let mut news = site.live.join(site, subject);
        // What was seen already is news to whoever comes now.
        news.mark_changed();
        let pairs = which.have.split(',').take(HAVE_MAX).filter_map(|pair| pair.split_once(':'));
        let have = pairs.map(|(id, tag)| (id.to_owned(), tag.to_owned())).collect();
        Ok(Self { site: site.clone(), news, which, guest, have, sent: BTreeMap::new(), stop, _slot: slot })
    }

    fn stream(self) -> impl Stream<Item = Result<Event, Infallible>> {
        stream::unfold(self, |mut viewer| async move {
            let event = viewer.next().await?;
            Some((Ok(event), viewer))
        })
    }

    /// What to tell next; `None` once there is nothing more to tell.
    async fn next(&mut self) -> Option<Event> {
        loop {
            tokio::select! {
                biased;
                // Nobody left who could tell is as good as told.
                _ = self.stop.wait_for(|stop| *stop) => return None,
                changed = self.news.changed() => changed.ok()?,
                () = tokio::time::sleep(TICK) => return Some(tell(&self.site, "tick", &[])),
            }
            let news = self.news.borrow_and_update().clone();
            let Some(snapshot) = news else { continue };
            let parts = self.which.parts(&self.site, &self.guest, &snapshot).ok()?;
            let fresh: Vec<&Part> =
                parts.iter().filter(|part| self.have.get(part.id) != Some(&part.tag())).collect();
            if fresh.is_empty() {
                continue;
            }
            let news: Vec<_> = fresh.iter().map(|part| News::of(part, self.sent.get(part.id))).collect();
            let event = tell(&self.site, "parts", &news).id(snapshot.version.to_string());
            for part in fresh {
                self.have.insert(part.id.to_owned(), part.tag());
                self.sent.insert(part.id, part.clone());
            }
            return Some(event);
        }
    }
}

/// A part as it is told: its name, its digest, and its text or how that comes of the one before.
#[derive(Serialize)]
#[serde(untagged)]
enum News<'a> {
    Whole(&'static str, String, &'a str),
    Changed(&'static str, String, Vec<Step<'a>>),
}

impl<'a> News<'a> {
    fn of(part: &'a Part, sent: Option<&Part>) -> Self {
        match sent.and_then(|sent| patch(&sent.html, &part.html)) {
            Some(steps) => Self::Changed(part.id, part.tag(), steps),
            None => Self::Whole(part.id, part.tag(), &part.html),
        }
    }
}

fn tell(site: &Site, kind: &str, parts: &[News<'_>]) -> Event {
    let data = serde_json::json!({ "now": site.engine.clock().now().0, "parts": parts }).to_string();
    Event::default().event(kind).data(data)
}

/// `GET /live`
pub(super) async fn overview(
    State(site): State<Site>,
    guest: Guest,
    source: Source,
    Params(which): Params<Which>,
) -> Result<Response, Problem> {
    let subject = if which.page == "audit" { Subject::Audit } else { Subject::All };
    Ok(Sse::new(Viewer::new(&site, source, subject, guest, which)?.stream()).into_response())
}

/// `GET /jobs/{job}/live`
pub(super) async fn job(
    State(site): State<Site>,
    job: Job,
    guest: Guest,
    source: Source,
    Params(which): Params<Which>,
) -> Result<Response, Problem> {
    Ok(Sse::new(Viewer::new(&site, source, Subject::Job(job.id), guest, which)?.stream()).into_response())
}
