//! The table of layers.

/// A part of the code with layers.
pub struct Part {
    /// Its name in messages.
    pub name: &'static str,
    /// The root folder of its crate.
    pub crate_root: &'static str,
    /// The modules of each level, the lowest first. Modules of one level must not import one another.
    pub levels: &'static [&'static [&'static str]],
    /// The files that may contain unsafe code.
    pub with_unsafe: &'static [&'static str],
}

/// All parts with layers.
pub const PARTS: &[Part] = &[
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
        ],
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
