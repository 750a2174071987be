//! The keys of the steps of several plans that are executed together. No two of these steps have the same key.
//!
//! Begin at [`StepKeys::of`].

use super::error::check_limit;
use super::fingerprint::FingerprintHasher;
use super::{Fingerprint, Plan, PlanError, TransferKey};

/// The most steps of all plans that are executed together: a key has room for 32 bits of a step's number.
const MAX_BATCH_STEPS: usize = u32::MAX as usize;

/// The keys of the steps of several plans. No two steps have the same key, even if two plans are equal. The steps
/// of a single plan have the keys of [`Step::key`](super::Step::key).
#[derive(Debug, Clone)]
pub struct StepKeys {
    /// The identity of the plans and their order.
    fingerprint: Fingerprint,
    /// The number that the first step of each plan has among the steps of all plans.
    first: Vec<u32>,
}

impl StepKeys {
    /// Numbers the steps of these plans, which every process gives in the same order.
    ///
    /// # Errors
    /// Returns [`PlanError::TooMany`] if the plans have more steps than there are numbers.
    pub fn of<'a>(plans: impl IntoIterator<Item = &'a Plan>) -> Result<Self, PlanError> {
        let mut digest = FingerprintHasher::new("muster plans");
        let mut fingerprint = None;
        let (mut first, mut count) = (Vec::new(), 0_usize);
        for plan in plans {
            first.push(u32::try_from(count).unwrap_or(u32::MAX));
            count = count.saturating_add(plan.len());
            check_limit("steps of plans that are executed together", count, MAX_BATCH_STEPS)?;
            digest.add_text(&plan.fingerprint().to_string());
            fingerprint.get_or_insert(plan.fingerprint());
        }
        let only = fingerprint.filter(|_| first.len() == 1);
        Ok(Self { fingerprint: only.unwrap_or_else(|| digest.finish()), first })
    }

    /// Returns the key of a step, by the index of its plan and its number in that plan.
    #[must_use]
    pub fn key(&self, plan: usize, step: u32) -> TransferKey {
        let first = self.first.get(plan).copied().unwrap_or_default();
        TransferKey::for_step(self.fingerprint, first.wrapping_add(step))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::plan::{ArrayDescription, DeviceId, Placement, PlanOptions};

    fn plan(rows: u64) -> Plan {
        let array = |spec: &str| {
            let text = format!(
                r#"{{"shape": [{rows}, 8], "dtype": "float32", "sharding": {{
                    "mesh": {{"axes": [{{"name": "x", "size": 4}}], "devices": [0, 1, 2, 3]}}, "spec": {spec}}}}}"#
            );
            ArrayDescription::from_json(&text).unwrap()
        };
        let placement = Placement::blocks((0..4).map(DeviceId), 1, 1);
        Plan::new(array(r#"["x"]"#), array(r#"[null, "x"]"#), &placement, PlanOptions::default()).unwrap()
    }

    #[test]
    fn steps_of_equal_plans_have_keys_of_their_own() {
        let plans = [plan(4), plan(8), plan(4)];
        let keys = StepKeys::of(&plans).unwrap();
        let all: HashSet<_> = (0..3)
            .flat_map(|number| plans[number].steps().map(move |step| (number, step.index)))
            .map(|(number, step)| keys.key(number, step).0)
            .collect();
        assert_eq!(all.len(), plans.iter().map(Plan::len).sum::<usize>());
        let other = StepKeys::of([&plans[1], &plans[0], &plans[2]]).unwrap();
        assert!(!all.contains(&other.key(0, 0).0), "another order has other keys");
    }

    #[test]
    fn the_steps_of_a_single_plan_keep_their_keys() {
        let plan = plan(4);
        let keys = StepKeys::of([&plan]).unwrap();
        assert!(plan.steps().all(|step| keys.key(0, step.index) == step.key));
    }
}
