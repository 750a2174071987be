//! The preview (dry run) of an exclusion: shows its effects and changes nothing.
//!
//! The preview has no rule of its own. It performs the exclusion on a copy of the job by the code of
//! `exclusion_rules.rs`, does all pending work, and compares the copy with the job. Begin at
//! `Job::preview_exclusion`.

use std::sync::Arc;

use super::actor::{Actor, CommandReason};
use super::command::{BarrierPreview, CommandRefusal, ExclusionPreview};
use super::event::EventKind;
use super::exclusion::ExclusionTarget;
use super::ids::Timestamp;
use super::input::Effect;
use super::job::Job;

impl Job {
    /// Returns the effects of an exclusion. It performs the exclusion on a copy of the job, so that both
    /// follow the same rules.
    ///
    /// # Errors
    /// If the exclusion would be refused for any reason except that it ends the run.
    pub(super) fn preview_exclusion(
        &self,
        now: Timestamp,
        actor: &Actor,
        reason: &CommandReason,
        target: &ExclusionTarget,
    ) -> Result<ExclusionPreview, CommandRefusal> {
        self.check_exclusion(target)?;
        // The copy shares everything that the exclusion does not change.
        let (mut trial, mut effects) = (self.clone(), Vec::new());
        let tasks = self.tasks_excluded_by(target);
        let id = Arc::make_mut(&mut trial.exclusions).add(
            target.clone(),
            actor.clone(),
            reason.clone(),
            now,
            None,
        );
        trial.begin_evictions_of_exclusion(now, &mut effects, id, tasks.clone());
        trial.run_pending_work(now, &mut effects, &mut { usize::MAX });
        let mut preview = ExclusionPreview {
            calls_refused: 0,
            calls_answered: 0,
            barriers: Vec::new(),
            live_sets: self
                .run
                .live_set_requests
                .keys()
                .filter(|set| !trial.run.live_set_requests.contains_key(set))
                .count(),
            starts_run: self.run.started_at.is_none() && trial.run.started_at.is_some(),
            ends_run: trial.run.ended.filter(|_| self.run.ended.is_none()).map(|(outcome, _)| outcome),
            live: trial.run.task_ids().filter(|id| trial.run.expect_task(*id).is_connected()).collect(),
            tasks,
        };
        for effect in effects {
            match effect {
                Effect::Reply(_, Err(failure)) if failure.is_exclusion() => preview.calls_refused += 1,
                Effect::Reply(..) => preview.calls_answered += 1,
                Effect::Event(event) => preview.barriers.extend(match event.what {
                    EventKind::BarrierPassed { barrier, counter, .. } => {
                        Some(BarrierPreview { id: barrier.to_string(), counter, passes: true })
                    }
                    EventKind::BarrierFailed { barrier, counter, .. } => {
                        Some(BarrierPreview { id: barrier.to_string(), counter, passes: false })
                    }
                    _ => None,
                }),
                Effect::RequestIncarnation(_)
                | Effect::CommandDone(_)
                | Effect::ClaimAnswered(_)
                | Effect::BarrierEnded(_)
                | Effect::FreeLater(_) => {}
            }
        }
        Ok(preview)
    }
}
