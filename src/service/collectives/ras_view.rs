//! The views of what RAS, NCCL's own monitoring, says. `view.rs` has the others. Begin at [`CliqueRasView`].

use muster_collectives::ras::{RasRank, RasRankState};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::judged_cliques::TaskNames;
use super::ras_questions::RasAnswer;
use super::report_store::ReportedClique;
use crate::coordination::{TaskId, Timestamp};

/// The RAS report on a clique. RAS counts calls at slightly different moments, and knows no times on the GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = CliqueRas)]
pub struct CliqueRasView {
    /// When it was said.
    pub came_at: Timestamp,
    /// The number of ranks that have answered RAS.
    pub answered: u32,
    /// The most and the fewest collectives that one of them has called.
    pub front: u64,
    /// See `front`.
    pub back: u64,
    /// The ranks that differ from most, the worst first; at most 64.
    pub notable: Vec<RasRankView>,
    /// The number of all ranks that differ.
    pub notable_count: u32,
}

/// The RAS report on a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = RasRank)]
pub struct RasRankView {
    /// The rank.
    pub rank: u32,
    /// Its task, if that is known.
    #[schema(value_type = Option<i32>)]
    pub task: Option<TaskId>,
    /// The address of its host, as RAS writes it.
    pub host: String,
    /// Its process; none if RAS does not know it.
    pub pid: Option<u32>,
    /// `dead`, `unresponsive`, `failed`, `aborted`, `absent`, `starting` or `answers`.
    pub state: String,
    /// The same in words.
    pub text: String,
    /// The number of collectives that its program has called, if it has answered.
    pub called: Option<u64>,
}

impl RasRankView {
    pub(crate) fn new(found: &RasRank, task: Option<TaskId>) -> Self {
        Self {
            rank: found.rank,
            task,
            host: found.host.clone(),
            pid: Some(found.pid).filter(|pid| *pid != 0),
            state: found.state.name().to_owned(),
            text: found.state.predicate(),
            called: found.called,
        }
    }

    /// Returns whether the rank cannot go on by itself.
    #[must_use]
    pub fn is_trouble(&self) -> bool {
        RasRankState::TROUBLE_NAMES.contains(&&*self.state)
    }
}

/// The last answer of RAS.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Ras)]
pub struct RasView {
    /// When it came.
    pub came_at: Timestamp,
    /// NCCL's version; empty if there was no answer.
    pub nccl_version: String,
    /// Why there was none; empty if there was.
    pub error: String,
    /// The number of cliques of which it knew something.
    pub cliques: usize,
}

impl RasView {
    pub(super) fn new(answer: &RasAnswer) -> Self {
        Self {
            came_at: answer.came_at,
            nccl_version: answer.ras.nccl_version.clone(),
            error: answer.ras.error.clone(),
            cliques: answer.ras.communicators.len(),
        }
    }
}

impl CliqueRasView {
    /// Returns what RAS says of a clique, if that says something about the present.
    pub(super) fn new(names: &TaskNames<'_>, clique: &ReportedClique<'_>, now: Timestamp) -> Option<Self> {
        let (answer, ras) = (names.of_job.ras.answer(now)?, names.ras(clique, now)?);
        let view = |rank: &RasRank| RasRankView::new(rank, names.task(clique, rank.rank));
        Some(Self {
            came_at: answer.came_at,
            answered: ras.answered,
            front: ras.front,
            back: ras.back,
            notable: ras.notable.iter().map(view).collect(),
            notable_count: ras.notable_count,
        })
    }
}
