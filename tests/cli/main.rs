//! The command line, as the real program: what operators type, and what comes of it.

mod acting;
mod benching;
mod configuration;
mod figures;
mod hostile;
mod launching;
mod process;
mod serving;
mod status;
mod steering;
mod streams;
mod transfer;
mod web;
