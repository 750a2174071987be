//! Tests of collectives from end to end: processes that use the simulated NCCL, with Muster's profiler plug-in loaded by
//! nothing but NCCL's variable, report to a real server, which names the task that holds the others up.
//!
//! Begin at `gpu_job.rs` (the server and the processes), then `late_ranks.rs`. The processes are this program again
//! (`rank_program.rs`); a test steers them by lines on their standard input.
//!
//! | file | what happens to the job |
//! | --- | --- |
//! | `late_ranks.rs` | a rank calls a collective late, or never |
//! | `held_gpus.rs` | a GPU does not reach a collective that its program has called |
//! | `different_programs.rs` | a rank calls another collective than the others |
//! | `deaths.rs` | a process is killed |
//! | `ras.rs` | a rank does not report, and NCCL's own monitoring tells more of it |
//! | `service_outages.rs` | the service is killed and starts again, or is never there |
//! | `several_cliques.rs` | waits in several cliques that form a chain or a cycle |
//! | `healthy_jobs.rs` | nothing, while the ranks are irregular |
//! | `nccl_versions.rs` | it runs with every table of NCCL's profiler; the real NCCL finds the plug-in |

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod deaths;
mod different_programs;
mod gpu_job;
#[path = "../harness/mod.rs"]
mod harness;
mod healthy_jobs;
mod held_gpus;
mod late_ranks;
mod libraries;
mod nccl_versions;
mod rank_program;
mod ras;
mod service_outages;
mod several_cliques;
mod simulated_nccl;
#[path = "../support/skip.rs"]
mod skip;
