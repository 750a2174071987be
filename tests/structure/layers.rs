//! The table of layers.

/// A part of the code with layers.
pub struct Part {
    /// Its name in messages.
    pub name: &'static str,
    /// The root folder of its crate.
    pub crate_root: &'static str,
    /// The modules of each level, the lowest first. Modules of one level must not import one another.
    pub levels: &'static [&'static [&'static str]],
    /// Whether imports between its files may form a circle, as between a state that handlers share and the handlers.
    pub files_may_form_circles: bool,
    /// The files that may have unsafe code.
    pub with_unsafe: &'static [&'static str],
}

/// All parts with layers.
pub const PARTS: &[Part] = &[
    Part {
        name: "muster",
        crate_root: "src",
        levels: &[
            // Values and tools, each by itself.
            &["cow", "file_permissions", "file_watch", "meter", "proto", "test_pattern", "text"],
            // The state machine; protocols.
            &["coordination", "http2", "tls"],
            &["engine"],
            // The text format of metrics, logs and traces: whoever measures something writes its own samples.
            &["telemetry"],
            // What runs on the machines of a job; what the server knows besides the state machine.
            &["agent", "doctor", "service/reports"],
            &["service/findings"],
            &["service"],
            // The ports. They do not know one another.
            &["grpc", "http"],
            // The configuration of everything below.
            &["config"],
            // The composition root and the clients; properties for fuzzers, of every layer.
            &["cli", "fuzzing"],
            &["main"],
        ],
        files_may_form_circles: true,
        with_unsafe: &["cli/allocator.rs", "grpc/prefault.rs"],
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
            // What must hold of what is read from outside; no part of the product.
            &["fuzzing"],
        ],
        files_may_form_circles: false,
        with_unsafe: &[
            "engine/resharding/copy.rs",
            "io/sys.rs",
            "launch/io_lists.rs",
            "memory/buffer.rs",
            "memory/copy.rs",
            "memory/mapping.rs",
            "memory/stream.rs",
            "memory/view.rs",
        ],
    },
    Part {
        name: "coordination",
        crate_root: "src/coordination",
        levels: &[
            // Values.
            &["actor", "deferred_free", "ids", "settings", "straggler_stats", "topology"],
            &[
                "barrier_record",
                "heartbeat_history",
                "devices",
                "directory",
                "exclusion",
                "failure",
                "task_state",
                "live_set",
            ],
            // Inputs and outputs.
            &["call", "device_map", "event", "failure_texts", "heartbeat_stats", "store"],
            &["barrier", "command", "event_queue"],
            &["input", "pending_barrier_stats", "timers", "view", "waiters"],
            // The tables of a run.
            &["context", "store_listing", "task"],
            &["run"],
            // The rules.
            &[
                "barrier_stats",
                "preemption",
                "task_failure",
                "job",
                "shutdown",
                "live_set_rules",
                "barrier_arrival",
                "barrier_completion",
                "registration",
            ],
            &["job_settings", "coordinator", "exclusion_rules", "operator_commands", "view_builder"],
            // Read access.
            &["invariants", "job_reader", "observation"],
        ],
        files_may_form_circles: false,
        with_unsafe: &[],
    },
];

impl Part {
    /// Returns the module of the table to which a file belongs: of a module and one within it, the inner one.
    pub fn module(&self, file: &str) -> Option<&'static str> {
        let path = file.trim_end_matches(".rs");
        let modules = self.levels.iter().flat_map(|level| level.iter()).copied();
        let of_module = |module: &&str| {
            path.strip_prefix(*module).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        modules.filter(of_module).max_by_key(|module| module.len())
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
        ("configuration.rs", None),
    ] {
        assert_eq!(part.module(file), module, "{file}");
    }
}
