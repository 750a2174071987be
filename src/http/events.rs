//! What happened in a job: page by page, or as a stream of server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, watch};
use utoipa::{IntoParams, ToSchema};

use super::extract::{Job, Params};
use super::page::limit;
use super::{Problem, Site};
use crate::coordination::{Change, JobId, JobName, RunNumber, Timestamp};
use crate::engine::{Engine, Numbered};

/// How long a stream may be silent before a comment shows that it is alive.
const SILENCE_MAX: Duration = Duration::from_secs(15);

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventLine {
    /// Its place among all events of this server, from 1.
    pub number: u64,
    /// When, in microseconds since the Unix epoch.
    pub at: Timestamp,
    /// In which job.
    pub job: JobName,
    /// In which of its runs.
    pub run: RunNumber,
    /// What changed.
    #[serde(flatten)]
    pub what: Change,
    /// Why.
    pub reason: String,
}

impl EventLine {
    fn of(numbered: &Numbered, job: &JobName) -> Self {
        let event = numbered.event.as_ref().clone();
        let (at, run, what, reason) = (event.at, event.run, event.what, event.reason);
        Self { number: numbered.number, at, job: job.clone(), run, what, reason }
    }
}

/// Some events of a job, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventsPage {
    /// The events.
    pub events: Vec<EventLine>,
    /// What to give as `after` for those that follow.
    pub next: u64,
    /// Events that are no longer kept may be missing before the first.
    pub gap: bool,
}

/// The streams that are open.
pub struct Streams {
    most: usize,
    slots: Arc<Semaphore>,
    stop: watch::Sender<bool>,
}

impl Default for Streams {
    fn default() -> Self {
        Self::new(Self::DEFAULT)
    }
}

impl Streams {
    /// How many are served at once unless a setting says otherwise.
    pub const DEFAULT: usize = 256;

    /// Room for this many streams at once.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most, slots: Arc::new(Semaphore::new(most)), stop: watch::Sender::new(false) }
    }

    /// How many are open, and how many may be.
    #[must_use]
    pub fn open(&self) -> (usize, usize) {
        (self.most.saturating_sub(self.slots.available_permits()), self.most)
    }

    /// Room for one more, and what becomes true when it is to end.
    pub(super) fn enter(&self) -> Result<(OwnedSemaphorePermit, watch::Receiver<bool>), Problem> {
        let slot = Arc::clone(&self.slots).try_acquire_owned();
        Ok((slot.map_err(|_| Problem::too_many_streams(self.most))?, self.stop.subscribe()))
    }

    /// Ends every stream: the server stops.
    pub fn close(&self) {
        self.stop.send_replace(true);
    }
}

/// Which events are wanted.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventsQuery {
    /// The number of the last event that the caller has.
    #[serde(default)]
    after: u64,
    /// How many to give at most; a stream has no end.
    limit: Option<usize>,
    /// 1 for a stream of server-sent events, as with `Accept: text/event-stream`.
    #[serde(default)]
    stream: u8,
}

/// What happened in a job
///
/// As JSON a page, oldest first. As `text/event-stream` what happens from `after` (or the header `Last-Event-ID`) on,
/// without end: each event has its number as `id`, its kind as `event` and its JSON as `data`. An event `gap` says that
/// some are no longer kept; it comes too if `after` is of a server before this one, and then everything that there is.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/events", operation_id = "events_list", tag = "events",
    params(("job" = String, Path, description = "The job's name"), EventsQuery),
    responses(
        (status = 200, body = EventsPage, description = "A page of events, or a stream of them"),
        (status = 503, description = "Too many streams are open"),
    ))]
pub(super) async fn list(
    State(site): State<Site>,
    job: Job,
    headers: HeaderMap,
    Params(query): Params<EventsQuery>,
) -> Result<Response, Problem> {
    let accepts = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if query.stream == 0 && !accepts.contains("text/event-stream") {
        return Ok(Json(page(&site.engine, &job, query.after, limit(query.limit))).into_response());
    }
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok()?.parse().ok());
    let follower = Follower::new(&site, job, last.unwrap_or(query.after))?;
    let alive = KeepAlive::new().interval(SILENCE_MAX).text("alive");
    Ok(Sse::new(follower.stream()).keep_alive(alive).into_response())
}

fn page(engine: &Engine, job: &Job, after: u64, limit: usize) -> EventsPage {
    let (past, _) = engine.follow_job(job.id, after);
    let gap = past.lacks(after);
    let mut next = past.events.last().map_or(after, |last| last.number);
    let mut events = Vec::new();
    for numbered in &past.events {
        events.push(EventLine::of(numbered, &job.name));
        if events.len() == limit {
            next = numbered.number;
            break;
        }
    }
    EventsPage { events, next, gap }
}

/// One who follows the events of a job.
struct Follower {
    engine: Arc<Engine>,
    id: JobId,
    name: JobName,
    /// The last event that was looked at.
    last: u64,
    /// What is kept and has not been sent yet, the next one last.
    kept: Vec<Numbered>,
    coming: broadcast::Receiver<Numbered>,
    /// Some events before the next one are lost.
    gap: bool,
    stop: watch::Receiver<bool>,
    _slot: OwnedSemaphorePermit,
}

impl Follower {
    fn new(site: &Site, job: Job, after: u64) -> Result<Self, Problem> {
        let (slot, stop) = site.streams.enter()?;
        let engine = Arc::clone(&site.engine);
        let coming = engine.follow(u64::MAX).1;
        let (id, name) = (job.id, job.name);
        // Events that have not happened yet were seen on a server before this one: here everything is new.
        let foreign = after > engine.figures().events;
        let last = if foreign { 0 } else { after };
        let mut follower =
            Self { engine, id, name, last, kept: Vec::new(), coming, gap: foreign, stop, _slot: slot };
        follower.catch_up();
        Ok(follower)
    }

    /// Takes what is kept since the last event; returns how far back that is whole.
    fn catch_up(&mut self) -> u64 {
        let (mut past, coming) = self.engine.follow_job(self.id, self.last);
        self.gap |= past.lacks(self.last);
        past.events.reverse();
        (self.kept, self.coming) = (past.events, coming);
        past.whole_after
    }

    fn stream(self) -> impl Stream<Item = Result<Event, Infallible>> {
        stream::unfold(self, |mut follower| async move {
            let event = follower.next().await?;
            Some((Ok(event), follower))
        })
    }

    /// The next event; `None` once there will be none.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if std::mem::take(&mut self.gap) {
                return Some(Event::default().event("gap").data("{}"));
            }
            let numbered = match self.kept.pop() {
                Some(numbered) => numbered,
                None => {
                    let coming = tokio::select! {
                        biased;
                        // Nobody left who could tell is as good as told.
                        _ = self.stop.wait_for(|stop| *stop) => return None,
                        coming = self.coming.recv() => coming,
                    };
                    match coming {
                        Ok(numbered) => numbered,
                        Err(RecvError::Lagged(_)) => {
                            let before = self.last;
                            let whole_after = self.catch_up();
                            self.engine.note_missed(whole_after.saturating_sub(before));
                            continue;
                        }
                        Err(RecvError::Closed) => return None,
                    }
                }
            };
            if numbered.number <= self.last {
                continue;
            }
            self.last = numbered.number;
            if numbered.event.job == self.id {
                return Some(sent(&EventLine::of(&numbered, &self.name)));
            }
        }
    }
}

fn sent(line: &EventLine) -> Event {
    let kind = crate::telemetry::events::kind(&line.what);
    // Strings and numbers always serialise.
    let data = serde_json::to_string(line).unwrap_or_default();
    Event::default().id(line.number.to_string()).event(kind).data(data)
}
