//! Serves the events of a job as pages or as server-sent events.
//!
//! The driver (`engine`) stores the events. Begin at `list_or_stream_events`, then `EventFollower`.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, watch};

use super::api::{EventLine, EventsPage};
use super::event_stream_limiter::EventStreamGuard;
use super::extractors::{JobPath, QueryParams};
use super::pagination::{page_limit, page_query};
use super::tables::{TableFormat, answer_in_format};
use super::{AppState, ClientNetwork, Problem, openapi};
use crate::coordination::{EventKind, JobId, JobName, RunNumber, TaskId, barrier_label};
use crate::engine::{Engine, NumberedEvent};

/// The maximum silence of a stream before a comment shows that it is alive.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

impl EventLine {
    fn from_event(numbered: &NumberedEvent, job: &JobName) -> Self {
        let event = numbered.event.as_ref().clone();
        let (at, run, what, reason) = (event.at, event.run, event.what, event.reason);
        Self { number: numbered.number, at, job: job.clone(), run, what, reason }
    }
}

page_query! {
    /// The query parameters of events.
    EventsQuery {
        /// Only events of these kinds, separated by commas: `task-failed`, `barrier-passed`, …
        kind: Option<String>,
        /// Only events about this task, alone or among others.
        task: Option<i32>,
        /// Only events about the barrier with this id, or with the name that pages show for a barrier of the service.
        barrier: Option<String>,
        /// Only events of this run.
        run: Option<u64>,
        /// `json` (the default), or `csv` for a table: all events that are kept, unless there is a limit. A stream is JSON.
        #[serde(default)]
        #[param(inline)]
        format: TableFormat,
        /// `true` for the newest first; `after` is then the number before which events are returned, or 0 for the
        /// newest of all.
        #[serde(default)]
        newest: bool,
        /// 1 for a stream of server-sent events, as with `Accept: text/event-stream`.
        #[serde(default)]
        stream: u8,
    }
    /// The number of the last event that the client has.
    after: u64,
    /// The maximum number of events; a stream has no end.
    limit
}

/// The names of all event kinds.
static KINDS: LazyLock<BTreeSet<String>> = LazyLock::new(|| openapi::variant_kind_names::<EventKind>("kind"));

/// The conditions on the events of a job.
struct EventFilter {
    job: JobId,
    kinds: Option<BTreeSet<String>>,
    task: Option<TaskId>,
    barrier: Option<String>,
    run: Option<RunNumber>,
}

impl EventFilter {
    fn new(job: JobId, query: &EventsQuery) -> Result<Self, Problem> {
        let kinds: Option<BTreeSet<String>> =
            query.kind.as_ref().map(|kinds| kinds.split(',').map(|kind| kind.trim().to_owned()).collect());
        let unknown = kinds.iter().flatten().find(|kind| !KINDS.contains(*kind));
        if let Some(unknown) = unknown {
            let all: Vec<&str> = KINDS.iter().map(String::as_str).collect();
            return Err(Problem::bad_query(format!(
                "kind: {unknown:?} is none; there are {}",
                all.join(", ")
            )));
        }
        let (barrier, run) = (query.barrier.clone(), query.run.map(RunNumber));
        Ok(Self { job, kinds, task: query.task.map(TaskId), barrier, run })
    }

    fn matches(&self, numbered: &NumberedEvent) -> bool {
        let event = &numbered.event;
        event.job == self.job
            && self.kinds.as_ref().is_none_or(|kinds| kinds.contains(event.what.kind()))
            && self.task.is_none_or(|task| event.what.is_about_task(task))
            && self.run.is_none_or(|run| event.run == run)
            && self.barrier.as_ref().is_none_or(|wanted| {
                let is_wanted = |(id, _): (&str, i64)| id == wanted || barrier_label(id) == wanted;
                event.what.subject().barrier.is_some_and(is_wanted)
            })
    }
}

/// The events of a job
///
/// As JSON it is a page, oldest first unless `newest` is set. As `text/event-stream` it has the events after
/// `after` (or the header `Last-Event-ID`) and all later ones, without end: each event has its number as
/// `id`, its kind as `event` and its JSON as `data`. An event `gap` reports that older events are no longer
/// kept. It also comes if `after` is from an earlier process of the server, and all events of this process
/// follow.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/events", operation_id = "events_list", tag = "events",
    params(("job" = String, Path, description = "The job's name"), EventsQuery),
    responses(
        (status = 200, description = "A page of events, or a stream of them",
            content((EventsPage = "application/json"), (String = "text/csv"))),
        (status = 404, description = "The job has had no such run; a stream waits for it"),
        (status = 503, description = "Too many streams are open"),
    ))]
pub(super) async fn list_or_stream_events(
    State(site): State<AppState>,
    job: JobPath,
    source: ClientNetwork,
    headers: HeaderMap,
    QueryParams(query): QueryParams<EventsQuery>,
) -> Result<Response, Problem> {
    let accepts = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let wanted = EventFilter::new(job.id, &query)?;
    if query.stream == 0 && !accepts.contains("text/event-stream") {
        site.check_run_has_opened(&job, query.run)?;
        let page = if query.newest { newest_first_events_page } else { oldest_first_events_page };
        let is_whole = query.format == TableFormat::Csv && query.limit.is_none();
        let limit = if is_whole { usize::MAX } else { page_limit(query.limit) };
        return Ok(answer_in_format(query.format, page(&site.engine, &job, &wanted, query.after, limit)));
    }
    if query.newest {
        return Err(Problem::bad_query(
            "newest: a stream tells what happens as it happens: leave it out, or ask for a page",
        ));
    }
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok()?.parse().ok());
    let follower = EventFollower::new(&site, source, job, wanted, last.unwrap_or(query.after))?;
    let alive = KeepAlive::new().interval(KEEP_ALIVE_INTERVAL).text("alive");
    Ok(Sse::new(follower.into_stream()).keep_alive(alive).into_response())
}

fn oldest_first_events_page(
    engine: &Engine,
    job: &JobPath,
    wanted: &EventFilter,
    after: u64,
    limit: usize,
) -> EventsPage {
    let (past, _) = engine.subscribe_all_with_job_history(job.id, after);
    let gap = past.may_miss_events_after(after);
    let mut next = past.events.last().map_or(after, |last| last.number);
    let mut events = Vec::new();
    for numbered in past.events.iter().filter(|numbered| wanted.matches(numbered)) {
        events.push(EventLine::from_event(numbered, &job.name));
        if events.len() == limit {
            next = numbered.number;
            break;
        }
    }
    EventsPage { events, next, gap }
}

/// Returns the newest events first: those before number `before`, or the newest of all if that is 0.
fn newest_first_events_page(
    engine: &Engine,
    job: &JobPath,
    wanted: &EventFilter,
    before: u64,
    limit: usize,
) -> EventsPage {
    let (past, _) = engine.subscribe_all_with_job_history(job.id, 0);
    let first = past.events.first().map_or(1, |first| first.number);
    let earlier = |numbered: &&NumberedEvent| before == 0 || numbered.number < before;
    let mut found = past.events.iter().rev().filter(earlier).filter(|numbered| wanted.matches(numbered));
    let events: Vec<EventLine> =
        found.by_ref().take(limit).map(|numbered| EventLine::from_event(numbered, &job.name)).collect();
    // Events that are no longer kept would have been after the last one here.
    let more = found.next().is_some();
    let next = events.last().filter(|_| more).map_or(first, |last| last.number);
    EventsPage { events, next, gap: !more && past.may_miss_events_after(0) }
}

/// Follows the events of a job.
struct EventFollower {
    engine: Arc<Engine>,
    wanted: EventFilter,
    name: JobName,
    /// The number of the last event that was examined.
    last: u64,
    /// Kept events that are not sent yet, the next one last.
    kept: Vec<NumberedEvent>,
    incoming: broadcast::Receiver<NumberedEvent>,
    /// Events before the next one were lost.
    gap: bool,
    stop: watch::Receiver<bool>,
    _slot: EventStreamGuard,
}

impl EventFollower {
    fn new(
        site: &AppState,
        source: ClientNetwork,
        job: JobPath,
        wanted: EventFilter,
        after: u64,
    ) -> Result<Self, Problem> {
        let (slot, stop) = site.streams.reserve_event_stream(source)?;
        let engine = Arc::clone(&site.engine);
        let coming = engine.subscribe_events(u64::MAX).1;
        let name = job.name;
        // A number in the future comes from an earlier server process, so every event here is new to the
        // client.
        let foreign = after > engine.counters().events;
        let last = if foreign { 0 } else { after };
        let mut follower = Self {
            engine,
            wanted,
            name,
            last,
            kept: Vec::new(),
            incoming: coming,
            gap: foreign,
            stop,
            _slot: slot,
        };
        follower.resubscribe_and_collect_kept_events();
        Ok(follower)
    }

    /// Collects the kept events since the last one. Returns the number from which they are complete.
    fn resubscribe_and_collect_kept_events(&mut self) -> u64 {
        let (mut past, coming) = self.engine.subscribe_all_with_job_history(self.wanted.job, self.last);
        self.gap |= past.may_miss_events_after(self.last);
        past.events.reverse();
        (self.kept, self.incoming) = (past.events, coming);
        past.complete_after
    }

    fn into_stream(self) -> impl Stream<Item = Result<Event, Infallible>> {
        stream::unfold(self, |mut follower| async move {
            let event = follower.next_sse_event().await?;
            Some((Ok(event), follower))
        })
    }

    /// Returns the next event; `None` at the end of the stream.
    async fn next_sse_event(&mut self) -> Option<Event> {
        loop {
            if std::mem::take(&mut self.gap) {
                return Some(Event::default().event("gap").data("{}"));
            }
            let numbered = match self.kept.pop() {
                Some(numbered) => numbered,
                None => {
                    let coming = tokio::select! {
                        biased;
                        // A dropped sender means the same as the stop signal.
                        _ = self.stop.wait_for(|stop| *stop) => return None,
                        coming = self.incoming.recv() => coming,
                    };
                    match coming {
                        Ok(numbered) => numbered,
                        Err(RecvError::Lagged(_)) => {
                            let before = self.last;
                            let whole_after = self.resubscribe_and_collect_kept_events();
                            self.engine.add_to_missed_events(whole_after.saturating_sub(before));
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
            if self.wanted.matches(&numbered) {
                return Some(to_sse_event(&EventLine::from_event(&numbered, &self.name)));
            }
        }
    }
}

fn to_sse_event(line: &EventLine) -> Event {
    let kind = line.what.kind();
    // Strings and numbers always serialize.
    let data = serde_json::to_string(line).unwrap_or_default();
    Event::default().id(line.number.to_string()).event(kind).data(data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::coordination::{Actor, CommandReason, ExclusionTarget, JobSettings, OperatorCommand};

    fn events_query(kind: Option<&str>, task: Option<i32>) -> EventsQuery {
        EventsQuery {
            after: 0,
            limit: None,
            kind: kind.map(str::to_owned),
            task,
            barrier: None,
            run: None,
            format: TableFormat::Json,
            newest: false,
            stream: 0,
        }
    }

    fn event_numbers(page: &EventsPage) -> Vec<u64> {
        page.events.iter().map(|event| event.number).collect()
    }

    #[tokio::test]
    async fn events_are_found_by_kind_and_task_and_from_the_newest_on() {
        let engine = Engine::new(Clock::start());
        let job = |name: &str| {
            let id = engine.declare_job(name.parse().unwrap(), JobSettings::new(4)).unwrap();
            JobPath { id, name: name.parse().unwrap() }
        };
        // The first four events are about the creation of the jobs.
        let (job, other) = (job("a"), job("b"));
        let by = || Actor {
            who: Actor::ANONYMOUS.into(),
            address: None,
            means: crate::coordination::ActorOrigin::Api,
        };
        for (job, task) in [(&job, 1), (&other, 1), (&job, 2), (&job, 3)] {
            let act = OperatorCommand::Exclude {
                target: ExclusionTarget::Task(TaskId(task)),
                expires_in: None,
                end_run: true,
            };
            engine
                .perform_command(job.id, by(), CommandReason::try_from("r".to_owned()).unwrap(), act)
                .unwrap();
        }
        let all = oldest_first_events_page(
            &engine,
            &job,
            &EventFilter::new(job.id, &events_query(None, None)).unwrap(),
            0,
            100,
        );
        let excluded: Vec<u64> = all
            .events
            .iter()
            .filter(|event| event.what.kind() == "excluded")
            .map(|event| event.number)
            .collect();
        assert_eq!(excluded.len(), 3, "{all:?}");

        let wanted = EventFilter::new(job.id, &events_query(Some("excluded,readmitted"), None)).unwrap();
        assert_eq!(event_numbers(&oldest_first_events_page(&engine, &job, &wanted, 0, 100)), excluded);
        let backwards: Vec<u64> = excluded.iter().rev().copied().collect();
        let first = newest_first_events_page(&engine, &job, &wanted, 0, 2);
        assert_eq!(event_numbers(&first), backwards[..2]);
        let second = newest_first_events_page(&engine, &job, &wanted, first.next, 2);
        assert_eq!((event_numbers(&second), second.gap), (backwards[2..].to_vec(), false));
        assert!(newest_first_events_page(&engine, &job, &wanted, second.next, 2).events.is_empty());

        let wanted = EventFilter::new(job.id, &events_query(None, Some(2))).unwrap();
        assert_eq!(event_numbers(&oldest_first_events_page(&engine, &job, &wanted, 0, 100)), excluded[1..2]);
        let of_run = |run| EventFilter {
            run: Some(RunNumber(run)),
            ..EventFilter::new(job.id, &events_query(Some("excluded"), None)).unwrap()
        };
        assert_eq!(event_numbers(&oldest_first_events_page(&engine, &job, &of_run(1), 0, 100)), excluded);
        assert!(oldest_first_events_page(&engine, &job, &of_run(2), 0, 100).events.is_empty());
        let wrong = EventFilter::new(job.id, &events_query(Some("exploded"), None)).err().unwrap();
        assert!(wrong.detail.contains("task-failed"), "{wrong:?}");
    }

    #[test]
    fn every_kind_of_event_is_known() {
        assert!(KINDS.len() > 20 && KINDS.contains("barrier-passed"), "{KINDS:?}");
    }
}
