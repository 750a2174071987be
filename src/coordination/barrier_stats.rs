//! Measures ended barrier instances: keeps a record of each one, and updates the statistics of its members
//! (`straggler_stats.rs`).
//!
//! `unmeasured_barrier.rs` computes the record. An instance is measured after its callers are answered, and only a
//! few members at a time. An instance at which an unsynced member has arrived is measured at once, because its end
//! may bring the member into step; and all are measured before a member becomes unsynced. The driver receives the
//! record, with all arrivals, as `Effect::BarrierEnded`. Begin at [`Run::measure_oldest_unmeasured_barrier`].

use std::sync::Arc;

use super::barrier_record::BarrierRecordWithArrivals;
use super::context::TransitionContext;
use super::input::Effect;
use super::run::Run;

impl Run {
    /// Measures the oldest unmeasured instance, or continues with it: keeps its record, emits the effect, and
    /// adds the shares of as many members as `budget` allows.
    pub(super) fn measure_oldest_unmeasured_barrier(
        &mut self,
        cx: &mut TransitionContext<'_>,
        budget: &mut usize,
    ) {
        let Some(mut measure) = self.pending_barrier_stats.pop_front() else { return };
        let spread = match measure.spread.take() {
            Some(spread) => Some(spread),
            None => {
                // To sort a thousand arrivals costs as much as to answer some hundred calls.
                *budget = budget.saturating_sub(1 + measure.instance.arrived_count() / 16);
                let (record, arrivals, spread) =
                    measure.measure_instance(|task| !self.expect_task(task).unsynced);
                self.recent.push_back(record.clone());
                self.trim_barrier_records(cx.settings.bounds.barriers_recent);
                let (job, run) = (cx.job, cx.run);
                cx.effects.push(Effect::BarrierEnded(Arc::new(BarrierRecordWithArrivals {
                    job,
                    run,
                    record,
                    arrivals,
                })));
                spread
            }
        };
        let Some(mut spread) = spread else { return };
        let to = measure.instance.members.len().min(spread.position.saturating_add(*budget));
        *budget -= to - spread.position;
        for (task, arrival) in measure.instance.arrivals_in_range(spread.position, to) {
            if !self.expect_task(task).unsynced {
                let part = spread.member_timing(task, arrival.at);
                self.expect_task_mut(task).straggling.add_member_timing(&part);
            }
        }
        spread.position = to;
        if to < measure.instance.members.len() {
            measure.spread = Some(spread);
            self.pending_barrier_stats.push_front(measure);
        }
    }

    /// Measures every unmeasured instance.
    pub(super) fn measure_all_unmeasured_barriers(&mut self, cx: &mut TransitionContext<'_>) {
        while !self.pending_barrier_stats.is_empty() {
            self.measure_oldest_unmeasured_barrier(cx, &mut { usize::MAX });
        }
    }
}
