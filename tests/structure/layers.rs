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
            // What the server knows besides the state machine.
            &["reports"],
            &["findings"],
            &["service"],
            // The ports. They do not know one another.
            &["grpc", "http"],
            // The configuration of everything below.
            &["config"],
            // What runs on the machines of a job.
            &["agent", "doctor"],
            &["cli"],
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
    /// Returns the module of the table to which a file belongs.
    pub fn module(&self, file: &str) -> Option<&'static str> {
        let first = file.split('/').next().unwrap_or(file).trim_end_matches(".rs");
        self.levels.iter().flat_map(|level| level.iter()).copied().find(|module| *module == first)
    }

    /// Returns the level of a file.
    pub fn level(&self, file: &str) -> Option<usize> {
        let module = self.module(file)?;
        self.levels.iter().position(|level| level.contains(&module))
    }
}
