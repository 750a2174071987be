//! The table of layers: which modules may import which.

/// A part of the code with layers.
pub struct Part {
    /// Its name in messages.
    pub name: &'static str,
    /// The root folder of its crate.
    pub crate_root: &'static str,
    /// The modules of each level, the lowest first. Modules of one level must not import one another.
    pub levels: &'static [&'static [&'static str]],
    /// The imports that some modules may make of others, more narrowly than the levels say.
    pub narrow: &'static [Narrow],
    /// The files that may have unsafe code.
    pub with_unsafe: &'static [&'static str],
}

/// A module of which another one may import only a part.
pub struct Narrow {
    /// The importing module.
    pub of: &'static str,
    /// Those of its files to which this does not apply.
    pub except: &'static [&'static str],
    /// The imported module.
    pub whole: &'static str,
    /// The part of it that may be imported.
    pub part: &'static str,
}

/// The root folders of crates whose files do not import one another in a circle.
pub const CRATE_ROOTS: &[&str] = &[
    "src",
    "src/capi",
    "src/cliques",
    "src/clock",
    "src/collectives",
    "src/fabric",
    "src/gpu",
    "src/journal",
    "src/nccl_profiler",
    "src/transfer",
    "python/src",
    "tests/simulated_gpu/src",
];

/// All parts with layers.
pub const PARTS: &[Part] = &[
    Part {
        name: "muster",
        crate_root: "src",
        levels: &[
            // Values and tools, each by itself.
            &[
                "cow",
                "file_permissions",
                "file_watch",
                "meter",
                "proto",
                "sample_range",
                "test_pattern",
                "text",
            ],
            // The state machine; protocols.
            &["coordination", "http2", "tls"],
            &["engine"],
            // The text format of metrics, logs and traces: a module that measures something writes its own samples.
            &["telemetry"],
            // The programs on the machines of a job; the server's state besides the state machine.
            &["agent", "host_checks", "service/reports", "service/stacks"],
            &["service/collectives"],
            &["service/findings", "simulator"],
            &["service"],
            // The bodies that the HTTP port and its clients exchange.
            &["http/api"],
            // The ports. They do not know one another.
            &["grpc", "http"],
            // The configuration of everything below.
            &["config"],
            // The composition root and the clients; properties for fuzzers, of every layer.
            &["cli", "fuzzing"],
            &["main"],
        ],
        // A command is a client as any other, but for those that serve.
        narrow: &[Narrow {
            of: "cli",
            except: &[
                "cli/connection_limits.rs",
                "cli/server.rs",
                "cli/token.rs",
                "cli/worker/metrics_listener.rs",
            ],
            whole: "http",
            part: "http/api",
        }],
        with_unsafe: &["cli/allocator/glibc.rs", "grpc/prefault.rs"],
    },
    Part {
        name: "transfer",
        crate_root: "src/transfer",
        levels: &[
            &["base"],
            &["memory", "plan"],
            &["protocol"],
            &["launch"],
            &["io"],
            &["session"],
            &["engine"],
            // The properties of decoders; no part of the product.
            &["fuzzing"],
        ],
        narrow: &[],
        with_unsafe: &[
            "engine/resharding/gpu_copy.rs",
            "engine/resharding/host_copy.rs",
            "io/clique/exchange.rs",
            "io/device_fetch.rs",
            "io/fabric_fetch.rs",
            "io/fabric_reads.rs",
            "io/gpu_copies.rs",
            "io/local_copy.rs",
            "io/staging.rs",
            "io/sys.rs",
            "launch/launch_spans.rs",
            "memory/buffer.rs",
            "memory/device_copy.rs",
            "memory/fabric_registrations.rs",
            "memory/mapping.rs",
            "memory/region.rs",
            "memory/shared_memory_copy.rs",
            "memory/span_stream.rs",
            "memory/view.rs",
        ],
    },
    Part {
        name: "coordination",
        crate_root: "src/coordination",
        levels: &[
            // Values.
            &["actor", "deferred_free", "derived_value", "ids", "process_identity", "straggler_stats"],
            &["settings"],
            &[
                "barrier_record",
                "heartbeat_history",
                "store_entry",
                "exclusion",
                "failure",
                "fatal_gpu_error",
                "task_owner_table",
                "live_set_request",
                "topology",
            ],
            // Inputs and outputs.
            &["request_reply", "event", "shared_failures", "heartbeat_stats", "key_value_store"],
            &["barrier_table", "command", "unpublished_events", "run_state"],
            &["input", "unmeasured_barrier", "timers", "waiters"],
            // The tables of a run.
            &["context", "task"],
            &["run"],
            // The rules of a run, from those of one table to those that end barriers and tasks, and their callers.
            &["barrier_stats", "error_polls", "live_set_rules", "store_calls"],
            &["peer_job_calls", "preemption", "run_start"],
            &["barrier_ends_and_task_removal"],
            &["barrier_completion", "failure_detection"],
            &["barrier_arrival"],
            &["registration", "shutdown"],
            &["call_dispatch", "pending_work"],
            // A job and its rules.
            &["past_runs"],
            &["job"],
            &["connections", "peer_jobs"],
            &["exclusion_rules"],
            &["run_lifecycle"],
            &["fencing", "task_id_claims", "job_settings"],
            &["job_input_handlers"],
            &["exclusion_preview", "operator_commands"],
            &["coordinator"],
            // Read access.
            &["invariants", "views"],
        ],
        narrow: &[],
        with_unsafe: &[],
    },
];

/// Returns whether a file belongs to a module or to one within it.
fn is_within(file: &str, module: &str) -> bool {
    let rest = file.trim_end_matches(".rs").strip_prefix(module);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl Narrow {
    /// Returns whether this forbids an import.
    pub fn forbids(&self, from: &str, to: &str) -> bool {
        is_within(from, self.of) && !self.except.contains(&from) && self.goes_further(to)
    }

    /// Returns whether an imported file is one of the whole and not of the part.
    pub fn goes_further(&self, to: &str) -> bool {
        is_within(to, self.whole) && !is_within(to, self.part)
    }
}

impl Part {
    /// Returns the module of the table to which a file belongs: of a module and one within it, the inner one.
    pub fn module(&self, file: &str) -> Option<&'static str> {
        let modules = self.levels.iter().flat_map(|level| level.iter()).copied();
        modules.filter(|module| is_within(file, module)).max_by_key(|module| module.len())
    }

    /// Returns the level of a file.
    pub fn level(&self, file: &str) -> Option<usize> {
        let module = self.module(file)?;
        self.levels.iter().position(|level| level.contains(&module))
    }
}

#[test]
fn a_file_belongs_to_the_innermost_module_of_the_table() {
    let part = PARTS.iter().find(|part| part.name == "muster").expect("the crate is a part");
    for (file, module) in [
        ("service/findings/mod.rs", Some("service/findings")),
        ("service/operations.rs", Some("service")),
        ("config.rs", Some("config")),
        ("config/file.rs", Some("config")),
        ("http/api.rs", Some("http/api")),
        ("http/jobs.rs", Some("http")),
        ("configuration.rs", None),
    ] {
        assert_eq!(part.module(file), module, "{file}");
    }
}

#[test]
fn an_import_of_more_than_the_part_is_forbidden() {
    let rule = Narrow { of: "cli", except: &["cli/server.rs"], whole: "http", part: "http/api" };
    for (from, to, forbidden) in [
        ("cli/drain.rs", "http/api.rs", false),
        ("cli/drain.rs", "http/drain.rs", true),
        ("cli/status/render.rs", "http/mod.rs", true),
        ("cli/server.rs", "http/mod.rs", false),
        ("cli/drain.rs", "https.rs", false),
        ("config/load.rs", "http/allowed_hosts.rs", false),
    ] {
        assert_eq!(rule.forbids(from, to), forbidden, "{from} imports {to}");
    }
}
