//! The command line, tested with the real program as operators use it.

mod auto_exclude;
mod clients;
mod commands;
mod configuration;
mod figures;
mod hostile;
mod launch;
mod operations;
mod process;
mod serve;
mod status;
mod streams;
mod transfer;
mod transfer_bench;
mod web;
