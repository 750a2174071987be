//! Renders `GET /search`: finds jobs, tasks, hosts, barriers and keys.
//!
//! There is no index: a search reads each of the first 500 jobs at most once, and at most 50,000 keys in all. It reads the
//! names of keys, which every role may see, and never their values. Begin at `show_search_page`.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;

use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::keys::encode_key_for_page_address;
use super::status::barrier_display_name;
use super::{amount, links};
use crate::coordination::{
    BarrierKind, Coordinator, HostId, HostOfTasks, JobId, JobName, JobObservation, KeyEntry, TaskId,
};
use crate::http::extractors::QueryParams;
use crate::http::{AppState, Problem};
use crate::text::encode_query_value;

/// The maximum length of a query, in bytes.
const QUERY_BYTES_MAX: usize = 200;
/// The maximum number of jobs that are searched.
const JOBS_SEARCHED: usize = 500;
/// The maximum number of keys that are searched, and how many of them are read at once.
const KEYS_SEARCHED: usize = 50_000;
const KEYS_READ: usize = 1000;
/// The maximum number of results of each kind.
const SHOWN: usize = 100;

/// The query parameter of the search.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SearchQuery {
    q: String,
}

/// A matching task: its job, its number, and its address.
struct FoundTask {
    job: JobName,
    task: TaskId,
    address: String,
}

/// A matching host, with its tasks in one job.
struct FoundHost {
    job: JobName,
    host: HostId,
    tasks: Vec<TaskId>,
}

/// A matching barrier of the present run.
struct FoundBarrier {
    job: JobName,
    name: String,
    /// The id, encoded for an address.
    address: String,
    /// Its present or latest use in words.
    state: String,
}

impl FoundBarrier {
    fn new(job: &JobName, id: &str, state: String) -> Self {
        let (name, address) = (barrier_display_name(id), encode_query_value(id));
        Self { job: job.clone(), name, address, state }
    }
}

/// A matching key of the present run.
struct FoundKey {
    job: JobName,
    key: String,
    /// The key and its directory, encoded for an address.
    address: String,
    directory: String,
    bytes: usize,
}

impl FoundKey {
    fn new(job: &JobName, entry: &KeyEntry) -> Self {
        let key = String::from_utf8_lossy(&entry.key).into_owned();
        let end = entry.key.iter().rposition(|byte| *byte == b'/').unwrap_or_default();
        let [address, directory] = [&entry.key[..], &entry.key[..end]].map(encode_key_for_page_address);
        Self { job: job.clone(), key, address, directory, bytes: entry.value_bytes.unwrap_or_default() }
    }
}

/// The results of a search.
#[derive(Default)]
struct SearchResults {
    jobs: Vec<JobName>,
    tasks: Vec<FoundTask>,
    hosts: Vec<FoundHost>,
    barriers: Vec<FoundBarrier>,
    keys: Vec<FoundKey>,
    /// The number of keys that were read.
    keys_read: usize,
    /// Some kind has more results than are shown.
    more: bool,
}

impl SearchResults {
    fn result_count(&self) -> usize {
        self.jobs.len() + self.tasks.len() + self.hosts.len() + self.barriers.len() + self.keys.len()
    }

    /// Adds the matches of a job.
    fn add_job_matches(
        &mut self,
        query: &str,
        name: &JobName,
        seen: impl FnOnce() -> Option<JobObservation>,
    ) {
        if name.as_str().to_lowercase().contains(query) {
            self.jobs.push(name.clone());
        }
        let number = task_number(query);
        let Some(seen) = seen() else { return };
        if let Some(task) = number.and_then(|number| seen.task(TaskId(number))) {
            let address = task.peer.map(|peer| peer.to_string()).unwrap_or_default();
            self.tasks.push(FoundTask { job: name.clone(), task: task.task, address });
        }
        let is_peer = |task: &TaskId| {
            seen.task(*task).and_then(|task| task.peer).is_some_and(|peer| peer.to_string() == query)
        };
        // A number is that of a task, and no part of an address.
        let is_match = |host: &&HostOfTasks| {
            (number.is_none() && host.name.as_str().to_lowercase().contains(query))
                || (number.is_none()
                    && host.addresses.iter().any(|address| address.to_string().contains(query)))
                || (query.contains(':') && host.tasks.iter().any(is_peer))
        };
        let found = seen.hosts.hosts().iter().filter(is_match).map(|host| FoundHost {
            job: name.clone(),
            host: host.name.clone(),
            tasks: host.tasks.clone(),
        });
        self.hosts.extend(found.take(SHOWN + 1));
        if number.is_none() {
            self.add_barrier_matches(query, name, &seen);
        }
    }

    /// Adds the barriers of programs that match: those in progress, and then the ended ones.
    fn add_barrier_matches(&mut self, query: &str, job: &JobName, seen: &JobObservation) {
        let is_match =
            |kind: BarrierKind, id: &str| kind == BarrierKind::Client && id.to_lowercase().contains(query);
        let mut found: Vec<FoundBarrier> = Vec::new();
        for it in seen.barriers.iter().filter(|it| is_match(it.kind, &it.id)) {
            let state = format!("in progress: {} of {} arrived", it.arrived, it.members);
            found.push(FoundBarrier::new(job, &it.id, state));
        }
        for record in seen.recent.iter().rev().filter(|it| is_match(it.kind, &it.id)) {
            let ended = FoundBarrier::new(job, &record.id, "ended".to_owned());
            if found.len() <= SHOWN && found.iter().all(|other| other.address != ended.address) {
                found.push(ended);
            }
        }
        self.barriers.extend(found);
    }

    /// Adds the keys whose names match. `read` returns the keys of the job after the given one.
    fn add_key_matches(&mut self, query: &str, job: &JobName, read: impl Fn(&[u8], usize) -> Vec<KeyEntry>) {
        let mut after = Vec::new();
        while self.keys.len() <= SHOWN {
            if self.keys_read >= KEYS_SEARCHED {
                self.more = true;
                return;
            }
            let page = read(&after, KEYS_READ);
            self.keys_read += page.len();
            let is_match =
                |entry: &&KeyEntry| String::from_utf8_lossy(&entry.key).to_lowercase().contains(query);
            self.keys.extend(page.iter().filter(is_match).map(|entry| FoundKey::new(job, entry)));
            match page.last().filter(|_| page.len() == KEYS_READ) {
                Some(last) => after = last.key.to_vec(),
                None => return,
            }
        }
    }

    /// Limits the results of each kind.
    fn with_limited_results(mut self) -> Self {
        let counts =
            [self.jobs.len(), self.tasks.len(), self.hosts.len(), self.barriers.len(), self.keys.len()];
        self.more |= counts.into_iter().any(|count| count > SHOWN);
        self.jobs.truncate(SHOWN);
        self.tasks.truncate(SHOWN);
        self.hosts.truncate(SHOWN);
        self.barriers.truncate(SHOWN);
        self.keys.truncate(SHOWN);
        self
    }
}

/// Returns the number of a task that a query names, with or without the word.
fn task_number(query: &str) -> Option<i32> {
    query.strip_prefix("task").unwrap_or(query).trim().parse().ok()
}

#[derive(Template)]
#[template(path = "search.html")]
struct SearchPageTemplate {
    page: PageFrame,
    query: String,
    found: SearchResults,
}

/// Serves `GET /search`.
pub(super) async fn show_search_page(
    State(site): State<AppState>,
    user: PageUser,
    QueryParams(asked): QueryParams<SearchQuery>,
) -> Result<Response, Problem> {
    let query = asked.q.trim();
    let query = query.get(..query.floor_char_boundary(QUERY_BYTES_MAX)).unwrap_or_default().to_owned();
    let (jobs, now): (Vec<(JobId, JobName)>, _) =
        site.engine.read(|core, now| (core.jobs().map(|(job, name)| (job, name.clone())).collect(), now));
    let mut found = SearchResults { more: jobs.len() > JOBS_SEARCHED, ..SearchResults::default() };
    if !query.is_empty() {
        let sought = query.to_lowercase();
        let is_number = task_number(&sought).is_some();
        for (job, name) in jobs.into_iter().take(JOBS_SEARCHED) {
            found
                .add_job_matches(&sought, &name, || site.engine.read(|core, now| core.observe_job(job, now)));
            if !is_number {
                found.add_key_matches(&sought, &name, |after, limit| {
                    let keys = |core: &Coordinator| Some(core.job(job)?.list_keys(b"", after, true, limit));
                    site.engine.read(|core, _| keys(core)).unwrap_or_default()
                });
            }
        }
    }
    let mut page = PageFrame::new(user, NavEntry::Unlisted, "Search", now);
    page.query.clone_from(&query);
    render_page(&SearchPageTemplate { page, query, found: found.with_limited_results() }, now)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn key_entry(key: String) -> KeyEntry {
        let (written_at, written_by) = (None, None);
        let key = Bytes::from(key);
        KeyEntry { key, value_bytes: Some(3), written_at, written_by, keys_below: 0, bytes_below: 0 }
    }

    /// Returns the keys after one of them, of a store with this many.
    fn read_keys(count: usize) -> impl Fn(&[u8], usize) -> Vec<KeyEntry> {
        move |after, limit| {
            let first = std::str::from_utf8(after).unwrap().rsplit('/').next().unwrap();
            let first = first.parse::<usize>().map_or(0, |last| last + 1);
            (first..count).take(limit).map(|number| key_entry(format!("Dir/k/{number:06}"))).collect()
        }
    }

    #[test]
    fn keys_are_found_by_parts_of_their_names_and_a_bounded_number_is_read() {
        let job = JobName::default();
        let mut found = SearchResults::default();
        found.add_key_matches("dir/k/00250", &job, read_keys(2600));
        let keys: Vec<&str> = found.keys.iter().map(|one| one.key.as_str()).collect();
        assert_eq!((keys.len(), keys[0], found.keys_read, found.more), (10, "Dir/k/002500", 2600, false));
        assert_eq!((found.keys[0].directory.as_str(), found.keys[0].bytes), ("Dir%252Fk", 3));

        let mut found = SearchResults::default();
        found.add_key_matches("nothing", &job, read_keys(KEYS_SEARCHED + 5000));
        assert_eq!((found.keys.len(), found.keys_read, found.more), (0, KEYS_SEARCHED, true));

        let mut found = SearchResults::default();
        found.add_key_matches("k", &job, read_keys(5000));
        let found = found.with_limited_results();
        assert_eq!((found.keys.len(), found.keys_read, found.more), (SHOWN, KEYS_READ, true));
    }

    #[test]
    fn a_number_is_that_of_a_task() {
        assert_eq!(["6", "task 6", "task6"].map(task_number), [Some(6); 3]);
        assert_eq!(["", "task", "step/6"].map(task_number), [None; 3]);
    }
}
