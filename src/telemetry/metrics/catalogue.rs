//! Declares every metric once, with its name, type, labels and help text. No other metric is exported.
//!
//! The label for the job is `muster_job`, because Prometheus sets the label `job` itself. Begin at [`Metric`].

/// The type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// A number that only grows while the server lives.
    Counter,
    /// A number that comes and goes.
    Gauge,
    /// Observations, counted by their size.
    Histogram,
}

impl MetricKind {
    /// Returns its name in the exposition format.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// One metric.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name, with its unit.
    pub name: &'static str,
    /// Its type.
    pub kind: MetricKind,
    /// Its labels.
    pub labels: &'static [&'static str],
    /// The help text.
    pub help: &'static str,
}

macro_rules! catalogue {
    ($list:ident: $what:literal; $($(#[doc = $help:literal])+ $it:ident: $kind:ident $name:literal [$($label:literal),*];)*) => {
        $(
            $(#[doc = $help])+
            pub static $it: Metric = Metric {
                name: $name,
                kind: MetricKind::$kind,
                labels: &[$($label),*],
                help: concat!($($help),+).trim_ascii(),
            };
        )*
        #[doc = $what]
        pub static $list: &[&Metric] = &[$(&$it),*];
    };
}

catalogue! {
    CATALOGUE: "Every metric of a server, in the order in which they are shown.";

    /// Always 1; the label says which version serves.
    BUILD_INFO: Gauge "muster_build_info" ["version"];
    /// 1 while the server is ready, 0 while it starts and stops.
    READY: Gauge "muster_ready" [];
    /// Jobs that are declared.
    JOBS: Gauge "muster_jobs" [];

    /// Tasks that the job has.
    JOB_TASKS: Gauge "muster_job_tasks" ["muster_job"];
    /// After how long a silence a task has failed.
    JOB_HEARTBEAT_TIMEOUT: Gauge "muster_job_heartbeat_timeout_seconds" ["muster_job"];
    /// 1 for the state that the present run is in, 0 for the others.
    RUN_STATE: Gauge "muster_run_state" ["muster_job", "state"];
    /// The number of the present run.
    RUN_NUMBER: Gauge "muster_run_number" ["muster_job"];
    /// When the registration of the present run opened.
    RUN_OPENED: Gauge "muster_run_opened_timestamp_seconds" ["muster_job"];
    /// When every task of the present run had registered; absent before.
    RUN_STARTED: Gauge "muster_run_started_timestamp_seconds" ["muster_job"];
    /// Runs that have ended, by how.
    RUNS: Counter "muster_runs_total" ["muster_job", "outcome"];
    /// Tasks by where they stand.
    TASKS: Gauge "muster_tasks" ["muster_job", "standing"];
    /// Hosts of the present run by state: down (no live task), degraded (some tasks failed or missing), excluded, healthy.
    HOSTS: Gauge "muster_hosts" ["muster_job", "state"];
    /// Tasks of the live set: connected and not excluded.
    LIVE_TASKS: Gauge "muster_live_tasks" ["muster_job"];
    /// Registrations that took effect; kind again: of a task that had been connected in the same run.
    REGISTRATIONS: Counter "muster_registrations_total" ["muster_job", "kind"];
    /// Tasks that failed, by the class of the failure; consequence: the run failed, and with it the task.
    TASK_FAILURES: Counter "muster_task_failures_total" ["muster_job", "class"];
    /// Exclusions in force: tasks or hosts that take no part.
    EXCLUSIONS: Gauge "muster_exclusions" ["muster_job"];
    /// Tasks that left in good order.
    TASK_DEPARTURES: Counter "muster_task_departures_total" ["muster_job"];
    /// Tasks whose connection broke without a word.
    SUSPICIONS: Counter "muster_suspicions_total" ["muster_job"];
    /// Suspected tasks that were heard again in time.
    RETURNS: Counter "muster_suspects_returned_total" ["muster_job"];
    /// Lives and connections of earlier runs that were turned away.
    FENCED: Counter "muster_fenced_total" ["muster_job"];
    /// Processes that lost their task to a newer one.
    SUPERSEDED: Counter "muster_superseded_total" ["muster_job"];
    /// Preemption notices: requests that all tasks save.
    PREEMPTIONS: Counter "muster_preemption_notices_total" ["muster_job"];

    /// Gaps between heartbeats, of all tasks of the present run. To choose a heartbeat timeout by.
    HEARTBEAT_GAPS: Histogram "muster_heartbeat_gap_seconds" ["muster_job"];
    /// 1 if the task is connected. Left out for jobs with more tasks than task-metrics-max.
    TASK_UP: Gauge "muster_task_up" ["muster_job", "task"];
    /// When the task was heard last. Left out for jobs with more tasks than task-metrics-max.
    TASK_LAST_HEARTBEAT: Gauge "muster_task_last_heartbeat_timestamp_seconds" ["muster_job", "task"];
    /// From 0 to 1: how far behind the others the task usually comes to barriers, as a part of the skew. Near 1: it is late
    /// every time. Left out for jobs with more tasks than task-metrics-max.
    TASK_STRAGGLER_SCORE: Gauge "muster_task_straggler_score" ["muster_job", "task"];
    /// How long after the first the task usually comes to barriers. Left out for jobs with more tasks than task-metrics-max.
    TASK_LATENESS: Gauge "muster_task_lateness_seconds" ["muster_job", "task"];
    /// How long the others have waited at barriers for this task alone, in the present run. Left out for jobs with more tasks
    /// than task-metrics-max.
    TASK_HELD_UP: Gauge "muster_task_held_up_seconds" ["muster_job", "task"];
    /// 1 if the job has more tasks than task-metrics-max, so that the metrics of single tasks are left out.
    TASK_METRICS_OMITTED: Gauge "muster_task_metrics_omitted" ["muster_job"];

    /// Barriers in progress.
    BARRIERS_IN_PROGRESS: Gauge "muster_barriers_in_progress" ["muster_job", "kind"];
    /// Members that barriers in progress wait for, added up.
    BARRIER_MISSING: Gauge "muster_barrier_missing_members" ["muster_job", "kind"];
    /// When the oldest barrier in progress began; absent while there is none.
    BARRIER_OLDEST: Gauge "muster_barrier_oldest_began_timestamp_seconds" ["muster_job", "kind"];
    /// Barriers that ended, by how.
    BARRIERS: Counter "muster_barriers_total" ["muster_job", "kind", "outcome"];
    /// From the first arrival at a barrier to its end.
    BARRIER_DURATION: Histogram "muster_barrier_duration_seconds" ["muster_job", "kind"];
    /// From the first arrival at a barrier to the last.
    BARRIER_SKEW: Histogram "muster_barrier_skew_seconds" ["muster_job", "kind"];
    /// How long tasks have waited at barriers that ended, added up over the tasks.
    BARRIER_BLOCKED: Counter "muster_barrier_blocked_seconds_total" ["muster_job", "kind"];
    /// Barriers that passed without some member, by the rules for restarted tasks.
    BARRIERS_WITHOUT: Counter "muster_barriers_passed_without_members_total" ["muster_job"];

    /// Reports of transfers by native workers: taken, repeated (nothing new) or refused. Jobs without any have none of these.
    TRANSFER_REPORTS: Counter "muster_transfer_reports_total" ["muster_job", "result"];
    /// Tasks whose present life has reported transfers.
    TRANSFER_TASKS: Gauge "muster_transfer_reporting_tasks" ["muster_job"];
    /// Bytes that tasks have moved in the present run, by the transport and by which way.
    TRANSFER_BYTES: Counter "muster_transfer_bytes_total" ["muster_job", "transport", "direction"];
    /// The same of each task; absent in jobs of too many tasks.
    TRANSFER_TASK_BYTES: Counter "muster_transfer_task_bytes_total" ["muster_job", "task", "transport", "direction"];
    /// Launches of transfers that ended in the present run, by how.
    TRANSFER_LAUNCHES: Counter "muster_transfer_launches_total" ["muster_job", "outcome"];
    /// Launches of each task that did not complete; absent in jobs of too many tasks.
    TRANSFER_TASK_FAILED: Counter "muster_transfer_task_failed_launches_total" ["muster_job", "task"];
    /// Launches of transfers under way, as both their sides count them.
    TRANSFER_IN_FLIGHT: Gauge "muster_transfer_launches_in_flight" ["muster_job"];
    /// Ends of connections between transfer engines, by how their lanes are made.
    TRANSFER_CONNECTIONS: Gauge "muster_transfer_connections" ["muster_job", "transport"];
    /// Cliques in the caches of the tasks.
    TRANSFER_CLIQUES: Gauge "muster_transfer_cliques" ["muster_job"];
    /// Lookups and evictions in those caches: hit, miss or eviction.
    TRANSFER_CACHE: Counter "muster_transfer_clique_cache_total" ["muster_job", "event"];
    /// Frames of lives that are over, which transfer engines turned away.
    TRANSFER_FENCED: Counter "muster_transfer_fenced_frames_total" ["muster_job"];
    /// Chunks that came damaged, and were sent again.
    TRANSFER_DAMAGED: Counter "muster_transfer_damaged_chunks_total" ["muster_job"];
    /// Lanes of connections that were lost.
    TRANSFER_LANES_LOST: Counter "muster_transfer_lanes_lost_total" ["muster_job"];
    /// Lanes of connections that were made anew.
    TRANSFER_LANES_MADE: Counter "muster_transfer_lanes_made_total" ["muster_job"];
    /// Fetches that became pushes, because the memory of the other side could not be read.
    TRANSFER_FALLBACKS: Counter "muster_transfer_fetch_fallbacks_total" ["muster_job"];
    /// Host memory that tasks have registered for transfers.
    TRANSFER_REGISTERED: Gauge "muster_transfer_registered_bytes" ["muster_job"];
    /// Memory of GPUs that tasks have registered for transfers.
    TRANSFER_REGISTERED_DEVICE: Gauge "muster_transfer_registered_device_bytes" ["muster_job"];
    /// How long launches take to go through each stage: prepare, dependencies, match (until both sides have launched), move;
    /// quiesce, from a cancellation to the proof that nothing lands any more; and connect, until a connection was made.
    TRANSFER_STAGES: Histogram "muster_transfer_stage_seconds" ["muster_job", "stage"];
    /// How long launches take that move everything, by transport and by how many bytes they move at most: 4KiB, 64KiB, 1MiB,
    /// 16MiB, 256MiB, more.
    TRANSFER_DURATIONS: Histogram "muster_transfer_duration_seconds" ["muster_job", "transport", "size_class"];
    /// Bytes of launches under way that are still to move, as both their sides count them, by class: latency, normal, bulk.
    TRANSFER_IN_FLIGHT_BYTES: Gauge "muster_transfer_in_flight_bytes" ["muster_job", "class"];
    /// Connections between transfer engines that ended while they were needed, as each side counts them, by why.
    TRANSFER_ABORTS: Counter "muster_transfer_clique_aborts_total" ["muster_job", "reason"];
    /// Of the clocks that native workers tell of, how far the worst is ahead of the service's; negative if it is behind.
    CLOCK_WORST: Gauge "muster_worker_clock_worst_offset_seconds" ["muster_job"];
    /// How far the clock of each native worker is ahead of the service's; absent in jobs of too many tasks.
    CLOCK_OFFSET: Gauge "muster_worker_clock_offset_seconds" ["muster_job", "task"];

    /// Calls that wait for an answer, by what they wait for.
    WAITING_CALLS: Gauge "muster_waiting_calls" ["muster_job", "waits_for"];
    /// Keys in the store.
    STORE_KEYS: Gauge "muster_store_keys" ["muster_job"];
    /// Keys and values in the store.
    STORE_BYTES: Gauge "muster_store_bytes" ["muster_job"];
    /// The limit of each bound, by the name of its setting; in bytes or in items, as the name says.
    BOUND_LIMIT: Gauge "muster_bound_limit" ["muster_job", "bound"];
    /// How much of a bound is taken. Only for bounds on what there is altogether.
    BOUND_USED: Gauge "muster_bound_used" ["muster_job", "bound"];
    /// 1 for a finding that is open and holds at this moment: something in what is measured wants a look. The severity is the
    /// present one, or the usual one of a finding that is not open: notice, warning or critical.
    FINDINGS: Gauge "muster_findings" ["muster_job", "finding", "severity"];
    /// Findings that were opened.
    FINDINGS_OPENED: Counter "muster_findings_opened_total" ["muster_job", "finding"];
    /// When the findings were last looked for. If this stands still, nobody is looking.
    FINDINGS_LOOKED: Gauge "muster_findings_looked_timestamp_seconds" [];

    /// Requests for the stacks of tasks; cause automatic: for a finding that says that tasks wait too long.
    STACK_REQUESTS: Counter "muster_stack_requests_total" ["muster_job", "cause"];
    /// Answers to these requests: accepted, or refused (not asked, late, a second one, invalid, no memory).
    STACK_ANSWERS: Counter "muster_stack_answers_total" ["muster_job", "result"];
    /// Tasks from which a helper or a worker has been heard that can send stacks.
    STACK_HELPERS: Gauge "muster_stack_helpers" ["muster_job"];
    /// Memory of the stacks of all jobs.
    STACK_BYTES: Gauge "muster_stack_bytes" [];
    /// The limit of muster_stack_bytes. Beyond it, the oldest request of another job loses its stacks.
    STACK_BYTES_LIMIT: Gauge "muster_stack_bytes_limit" [];
    /// Requests of helpers that wait at the server.
    STACK_WAITS: Gauge "muster_stack_waits" [];
    /// The limit of muster_stack_waits. Further helpers ask again and again instead.
    STACK_WAITS_LIMIT: Gauge "muster_stack_waits_limit" [];

    /// Reports of the profiler plug-in of NCCL: accepted, or refused (invalid, too many processes, no memory).
    COLLECTIVE_REPORTS: Counter "muster_collective_reports_total" ["muster_job", "result"];
    /// Processes that report their collectives, and those of them that ask NCCL for times on the GPU.
    COLLECTIVE_PROCESSES: Gauge "muster_collective_processes" ["muster_job"];
    /// See muster_collective_processes.
    COLLECTIVE_PROCESSES_TIMED: Gauge "muster_collective_processes_timed" ["muster_job"];
    /// Cliques of communicators of which a rank is heard.
    COLLECTIVE_CLIQUES: Gauge "muster_collective_cliques" ["muster_job"];
    /// Cliques whose ranks wait, by how the ranks that are waited for differ from the others. A short wait is no trouble.
    COLLECTIVE_CLIQUES_WAITING: Gauge "muster_collective_cliques_waiting" ["muster_job", "kind"];
    /// The longest time for which the ranks of a clique have waited.
    COLLECTIVE_WAIT_SECONDS: Gauge "muster_collective_wait_seconds" ["muster_job"];
    /// Questions to RAS, NCCL's own monitoring: answered, or failed. It is asked while cliques look stuck or lack reports.
    COLLECTIVE_RAS_QUESTIONS: Counter "muster_collective_ras_questions_total" ["muster_job", "result"];
    /// Ranks by the state that RAS says in its last answer of two minutes; only those that cannot go on by themselves: dead,
    /// unresponsive, failed, aborted. At most 64 of a clique.
    COLLECTIVE_RAS_RANKS: Gauge "muster_collective_ras_ranks" ["muster_job", "state"];
    /// Collectives, sends and receives that were enqueued, by function, as a sum over ranks: a collective of four ranks counts four
    /// times. Of functions that were used. The first report of a process counts its whole past, also after a restart of the service.
    COLLECTIVE_OPERATIONS: Counter "muster_collective_operations_total" ["muster_job", "function"];
    /// Their bytes: count times the size of an element.
    COLLECTIVE_BYTES: Counter "muster_collective_bytes_total" ["muster_job", "function"];
    /// The time of GPUs in collectives that were timed.
    COLLECTIVE_GPU_SECONDS: Counter "muster_collective_gpu_seconds_total" ["muster_job", "function"];
    /// Memory of the reports of all jobs.
    COLLECTIVE_REPORT_BYTES: Gauge "muster_collective_report_bytes" [];
    /// The limit of muster_collective_report_bytes. Beyond it, reports are refused.
    COLLECTIVE_REPORT_BYTES_LIMIT: Gauge "muster_collective_report_bytes_limit" [];

    /// Calls that were answered, or given up, by method, generation of the wire and code. Absent with rpc-metrics off.
    CALLS: Counter "muster_rpc_calls_total" ["method", "generation", "code"];
    /// How long calls took, from the turn in which they were read to their answer, or until they were given up. Calls that
    /// wait (barriers, polls, keys that nobody has written) take as long as they wait. Absent with rpc-metrics off.
    CALL_DURATION: Histogram "muster_rpc_duration_seconds" ["method", "generation"];
    /// Calls received, of any kind.
    CALLS_RECEIVED: Counter "muster_rpc_received_total" [];
    /// Calls that the wire edge itself refused: unknown, unreadable, too large, too slow or for no job.
    CALLS_REFUSED: Counter "muster_rpc_refused_total" [];
    /// Connections now.
    CONNECTIONS: Gauge "muster_connections" [];
    /// How many there may be.
    CONNECTIONS_LIMIT: Gauge "muster_connections_limit" [];
    /// Connections taken.
    CONNECTIONS_OPENED: Counter "muster_connections_opened_total" [];
    /// Connections that ended, by how.
    CONNECTIONS_ENDED: Counter "muster_connections_ended_total" ["ending"];
    /// Connections closed at once, because there were too many.
    CONNECTIONS_REFUSED: Counter "muster_connections_refused_total" [];
    /// Connections that turned out to speak no HTTP/2.
    CONNECTIONS_STRANGE: Counter "muster_connections_strange_total" [];
    /// TLS handshakes that failed, by listener and kind of reason; plaintext where only TLS is taken counts too.
    HANDSHAKES_FAILED: Counter "muster_tls_handshakes_failed_total" ["listener", "reason"];
    /// Times that the system could not hand over a connection.
    ACCEPT_ERRORS: Counter "muster_accept_errors_total" [];
    /// Bytes read from client connections.
    RECEIVED_BYTES: Counter "muster_received_bytes_total" [];
    /// Bytes written to client connections.
    SENT_BYTES: Counter "muster_sent_bytes_total" [];
    /// Memory taken by requests that arrive in pieces.
    BODIES_BYTES: Gauge "muster_bodies_in_flight_bytes" [];
    /// The limit of muster_bodies_in_flight_bytes.
    BODIES_BYTES_LIMIT: Gauge "muster_bodies_in_flight_limit_bytes" [];
    /// Memory taken by requests in progress over gRPC, beyond the allowances of their connections.
    STATE_BYTES: Gauge "muster_grpc_state_bytes" [];
    /// The limit of muster_grpc_state_bytes.
    STATE_BYTES_LIMIT: Gauge "muster_grpc_state_limit_bytes" [];

    /// Requests that were answered over HTTP, by the first digit of the status. A stream of events counts when it begins.
    HTTP_REQUESTS: Counter "muster_http_requests_total" ["listener", "class"];
    /// From the head of a request over HTTP to the head of its answer; how long a stream of events goes on is not in it.
    HTTP_DURATION: Histogram "muster_http_request_duration_seconds" ["listener"];
    /// HTTP connections now.
    HTTP_CONNECTIONS: Gauge "muster_http_connections" ["listener"];
    /// The limit of muster_http_connections. Connections without a request are closed to make room; while all are busy, only
    /// health is answered.
    HTTP_CONNECTIONS_LIMIT: Gauge "muster_http_connections_limit" ["listener"];
    /// HTTP connections that the server closed, by reason: evicted (another one needed the slot), head-timeout (the head of a
    /// request did not come in time), idle-timeout.
    HTTP_CONNECTIONS_CLOSED: Counter "muster_http_connections_closed_total" ["listener", "reason"];
    /// Memory taken by bodies of requests over HTTP.
    HTTP_BODIES_BYTES: Gauge "muster_http_bodies_bytes" [];
    /// The limit of muster_http_bodies_bytes; one source may use a quarter.
    HTTP_BODIES_BYTES_LIMIT: Gauge "muster_http_bodies_limit_bytes" [];

    /// Inputs that were applied to the state machine.
    INPUTS: Counter "muster_engine_inputs_total" [];
    /// How long the lock of the state machine was waited for: by inputs about one task or one key and by all other inputs
    /// (bulk), of which one in 63 is timed, and by looks (pages, scrapes, detectors), of which all are.
    LOCK_WAIT: Histogram "muster_engine_lock_wait_seconds" ["use"];
    /// How long the lock of the state machine was held: by one in 63 of the inputs about one task or one key, and by all others.
    LOCK_HELD: Histogram "muster_engine_lock_held_seconds" ["use"];
    /// The longest that the lock was held since the start, of all holds that were timed.
    LOCK_LONGEST: Gauge "muster_engine_lock_longest_hold_seconds" ["use"];
    /// Times that the server found that it could not run for a while, and forgave everybody's silence.
    LAGS: Counter "muster_engine_lags_total" [];
    /// How much later than asked for a timer woke up. Sampled twice a second.
    LOOP_LAG: Histogram "muster_loop_lag_seconds" [];
    /// Events that happened.
    EVENTS: Counter "muster_events_total" [];
    /// Events that are kept for those who ask later.
    EVENTS_KEPT: Gauge "muster_events_kept" [];
    /// The limit of muster_events_kept.
    EVENTS_LIMIT: Gauge "muster_events_limit" [];
    /// Events that a follower never saw, since it was too slow.
    EVENTS_MISSED: Counter "muster_events_missed_total" [];
    /// Followers of events: the log, and live pages.
    FOLLOWERS: Gauge "muster_event_followers" [];
    /// Streams of events that are open.
    STREAMS: Gauge "muster_event_streams" [];
    /// The limit of muster_event_streams.
    STREAMS_LIMIT: Gauge "muster_event_streams_limit" [];
    /// Spans that were left out of the traces, since too many were on their way. Absent where no traces are sent.
    SPANS_LEFT_OUT: Counter "muster_trace_spans_left_out_total" [];
    /// Spans that could not be sent to the collector, and are lost. Absent where no traces are sent.
    SPANS_FAILED: Counter "muster_trace_spans_failed_total" [];
    /// Lines of the audit, by what came of the act.
    AUDIT_LINES: Counter "muster_audit_lines_total" ["outcome"];
    /// Lines of the audit that are kept in memory.
    AUDIT_KEPT: Gauge "muster_audit_lines_kept" [];
    /// The limit of muster_audit_lines_kept.
    AUDIT_LIMIT: Gauge "muster_audit_lines_limit" [];
    /// Lines that are kept no more, since newer ones came. Those of an audit file stay there.
    AUDIT_DROPPED: Counter "muster_audit_lines_dropped_total" [];
    /// Lines that the audit file will never have: its queue was full.
    AUDIT_LOST: Counter "muster_audit_write_failures_total" [];
    /// Lines that wait to be written to the audit file.
    AUDIT_QUEUED: Gauge "muster_audit_lines_queued" [];
    /// Age of the oldest audit line that is not on disk. More than a second: the file cannot be written, or its disk hangs.
    AUDIT_WAITS: Gauge "muster_audit_unwritten_seconds" [];
    /// Log lines that were dropped: stderr was not read in time.
    LOG_DROPPED: Counter "muster_log_lines_dropped_total" [];
    /// Refusals of strangers that are in no line of their own, but in the count of one.
    AUDIT_GATHERED: Counter "muster_audit_refusals_gathered_total" [];
    /// Whether the server keeps a journal: 1, or 0 if the end of its process ends all runs.
    JOURNAL_ENABLED: Gauge "muster_journal_enabled" [];
    /// Records of the journal, over all lives of the server.
    JOURNAL_RECORDS: Counter "muster_journal_records_total" [];
    /// Bytes that this process has appended to the journal.
    JOURNAL_BYTES: Counter "muster_journal_appended_bytes_total" [];
    /// Records that are not on the disk yet. The loss of the host would lose them; the death of the process does not.
    JOURNAL_LAG: Gauge "muster_journal_records_not_on_disk" [];
    /// The space that the journal takes on the disk.
    JOURNAL_DISK: Gauge "muster_journal_disk_bytes" [];
    /// Times that records were written to the disk.
    JOURNAL_SYNCS: Counter "muster_journal_disk_writes_total" [];
    /// Snapshots that this process has written, by outcome.
    JOURNAL_SNAPSHOTS: Counter "muster_journal_snapshots_total" ["outcome"];
    /// The size of the latest snapshot of this process.
    JOURNAL_SNAPSHOT_BYTES: Gauge "muster_journal_snapshot_bytes" [];
    /// How long the latest snapshot of this process took.
    JOURNAL_SNAPSHOT_TIME: Gauge "muster_journal_snapshot_seconds" [];
    /// Whether changes are refused because the journal cannot be written.
    JOURNAL_TROUBLE: Gauge "muster_journal_refuses_changes" [];
    /// Records that could not be written: no room, or the disk fails.
    JOURNAL_LOST: Counter "muster_journal_records_lost_total" [];
    /// Calls and commands that were refused because the journal could not be written.
    JOURNAL_REFUSED: Counter "muster_journal_refused_changes_total" [];
    /// Starts of the server on this journal that found a state.
    JOURNAL_RESTARTS: Counter "muster_journal_restarts_total" [];
    /// Inputs that the start of this process applied again.
    JOURNAL_REPLAYED: Gauge "muster_journal_replayed_inputs" [];
    /// 1 if the state that the start of this process restored differs from the one whose digest the journal has.
    JOURNAL_STATE_DIFFERS: Gauge "muster_journal_state_differs" [];
    /// How long the start of this process read the journal.
    JOURNAL_REPLAY_TIME: Gauge "muster_journal_replay_seconds" [];
    /// Connections of the process before this one, at the start of this process: continued, or lost though they were kept.
    JOURNAL_CONNECTIONS: Gauge "muster_journal_connections_at_start" ["outcome"];
    /// The memory that the logs of kept connections take.
    KEPT_MEMORY: Gauge "muster_grpc_kept_memory_bytes" [];
    /// Connections whose sockets the keeper holds, so that they go on if this process dies.
    KEPT_CONNECTIONS: Gauge "muster_grpc_kept_connections" [];
    /// Whether a keeper starts the service again when it dies: 1, or 0 if nobody in this program does.
    KEEPER_ENABLED: Gauge "muster_keeper_enabled" [];
    /// Ends of the service that nobody asked for, since the keeper started: exited (with a code), killed (by a signal from
    /// outside, or the kernel for lack of memory) or crashed.
    KEEPER_ENDS: Counter "muster_keeper_service_ends_total" ["cause"];
    /// Scrapes before this one.
    SCRAPES: Counter "muster_scrapes_total" [];
    /// How long the scrape before this one took to put together.
    SCRAPE_DURATION: Gauge "muster_scrape_duration_seconds" [];

    /// Total user and system CPU time spent in seconds.
    PROCESS_CPU: Counter "process_cpu_seconds_total" [];
    /// Number of open file descriptors.
    PROCESS_FDS: Gauge "process_open_fds" [];
    /// Maximum number of open file descriptors.
    PROCESS_FDS_MAX: Gauge "process_max_fds" [];
    /// Virtual memory size in bytes.
    PROCESS_VIRTUAL: Gauge "process_virtual_memory_bytes" [];
    /// Resident memory size in bytes.
    PROCESS_RESIDENT: Gauge "process_resident_memory_bytes" [];
    /// Start time of the process since unix epoch in seconds.
    PROCESS_START: Gauge "process_start_time_seconds" [];
    /// Number of OS threads in the process.
    PROCESS_THREADS: Gauge "process_threads" [];
}

catalogue! {
    WORKER: "Every metric of a native worker. None has a name of a server's, so that nothing is counted twice where both are \
             scraped.";

    /// Always 1; the labels say which life of which task this is.
    ENGINE_INFO: Gauge "muster_transfer_engine_info" ["version", "task", "incarnation"];
    /// Bytes that this life of the task has moved, by peer, by transport and by which way.
    ENGINE_BYTES: Counter "muster_transfer_engine_bytes_total" ["peer", "transport", "direction"];
    /// Launches that ended, by how.
    ENGINE_LAUNCHES: Counter "muster_transfer_engine_launches_total" ["outcome"];
    /// Launches under way.
    ENGINE_IN_FLIGHT: Gauge "muster_transfer_engine_launches_in_flight" [];
    /// How long launches take to go through each stage: prepare, dependencies, match (until both sides have launched), move;
    /// quiesce, from a cancellation to the proof that nothing lands any more; and connect, until a connection was made.
    ENGINE_STAGES: Histogram "muster_transfer_engine_stage_seconds" ["stage"];
    /// How long launches take that move everything, by transport and by how many bytes they move at most: 4KiB, 64KiB, 1MiB,
    /// 16MiB, 256MiB, more.
    ENGINE_DURATIONS: Histogram "muster_transfer_engine_duration_seconds" ["transport", "size_class"];
    /// Bytes of launches under way that are still to move, by class: latency, normal, bulk.
    ENGINE_IN_FLIGHT_BYTES: Gauge "muster_transfer_engine_in_flight_bytes" ["class"];
    /// Connections that ended while they were needed, by why.
    ENGINE_ABORTS: Counter "muster_transfer_engine_clique_aborts_total" ["reason"];
    /// Connections, by how their lanes are made.
    ENGINE_CONNECTIONS: Gauge "muster_transfer_engine_connections" ["transport"];
    /// Lanes that live, likewise.
    ENGINE_LANES: Gauge "muster_transfer_engine_lanes" ["transport"];
    /// Cliques in the cache.
    ENGINE_CLIQUES: Gauge "muster_transfer_engine_cliques" [];
    /// Lookups and evictions there: hit, miss or eviction.
    ENGINE_CACHE: Counter "muster_transfer_engine_clique_cache_total" ["event"];
    /// Frames and connections of lives that are over, which were turned away.
    ENGINE_FENCED: Counter "muster_transfer_engine_fenced_frames_total" [];
    /// Retries, by cause: a damaged chunk, a lost lane that was made anew, or a fetch that became a push.
    ENGINE_RETRIES: Counter "muster_transfer_engine_retries_total" ["cause"];
    /// Lanes that were lost.
    ENGINE_LANES_LOST: Counter "muster_transfer_engine_lanes_lost_total" [];
    /// Host memory that is registered for transfers.
    ENGINE_REGISTERED: Gauge "muster_transfer_engine_registered_bytes" [];
    /// Memory of GPUs that is registered for transfers.
    ENGINE_REGISTERED_DEVICE: Gauge "muster_transfer_engine_registered_device_bytes" [];
    /// How far this host's clock is ahead of the service's; negative if it is behind. Absent until the service has told.
    ENGINE_CLOCK: Gauge "muster_transfer_engine_clock_offset_seconds" [];
}

/// Returns the catalogue as Markdown.
#[must_use]
pub fn markdown_table(metrics: &[&Metric]) -> String {
    let mut text = String::from("| metric | type | labels | what it says |\n| --- | --- | --- | --- |\n");
    for metric in metrics {
        let row = [metric.name, metric.kind.name(), &metric.labels.join(", "), metric.help].join(" | ");
        text.push_str(&format!("| {row} |\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_conventions() {
        let mut names = std::collections::BTreeSet::new();
        for metric in CATALOGUE.iter().chain(WORKER) {
            assert!(names.insert(metric.name), "{} is there twice", metric.name);
            let total = metric.name.ends_with("_total");
            assert_eq!(total, metric.kind == MetricKind::Counter, "{}: _total is for counters", metric.name);
            assert!(
                !metric.help.contains("  ") && metric.help.ends_with('.'),
                "{}: {:?}",
                metric.name,
                metric.help
            );
            assert!(metric.name.starts_with("muster_") || metric.name.starts_with("process_"));
        }
    }
}
