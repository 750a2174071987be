//! Models of the engine's concurrent cores, for loom: see `base/sync.rs`.

mod models;
