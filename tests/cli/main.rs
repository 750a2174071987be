//! The command line, tested with the real program as operators use it.

mod auto_exclude;
mod clients;
mod commands;
mod configuration;
#[path = "../support/fabric_provider.rs"]
mod fabric_provider;
mod figures;
#[path = "../harness/mod.rs"]
mod harness;
mod hostile;
mod journal;
mod keeper;
mod kept_connections;
mod launch;
mod operations;
mod runs;
mod serve;
mod simulate;
mod stacks;
mod status;
mod streams;
mod transfer;
mod transfer_bench;
