//! Plans as JSON.
//!
//! A plan in JSON tells everything: what it was made of, its steps, what it costs. Reading one trusts none of that.
//! The plan is made again from its source, destination, placement and options, and everything else in the text must
//! be what comes out. So a plan that was read is a plan that this program would have made, and a plan that is written
//! and read is the same plan.

use std::cell::Cell;
use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeStruct as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::error::within;
use super::{ArrayDescription, Cost, Fingerprint, MAX_PLAN_TEXT, Options, Placement, Plan, PlanError, Step};

/// The version of the rules by which plans are made, and of their text. Two programs make the same plans if it is the
/// same.
pub const PLAN_VERSION: u64 = 1;

impl Plan {
    /// The plan as JSON, on one line.
    ///
    /// # Errors
    /// [`PlanError::TooMany`] if its text is longer than what can be read again.
    pub fn to_json(&self) -> Result<String, PlanError> {
        let text = serde_json::to_string(self).map_err(|error| PlanError::json("the plan", &error))?;
        within("bytes of the plan", text.len(), MAX_PLAN_TEXT)?;
        Ok(text)
    }

    /// Reads a plan that [`Plan::to_json`] wrote.
    ///
    /// # Errors
    /// [`PlanError::Version`] for a plan of other rules, [`PlanError::Contradicts`] for one whose steps are not those
    /// that follow from its inputs, and everything that [`Plan::new`] refuses.
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        within("bytes of the plan", text.len(), MAX_PLAN_TEXT)?;
        let wrong = |error| PlanError::json("the plan", &error);
        let Version { version } = serde_json::from_str(text).map_err(wrong)?;
        if version != PLAN_VERSION {
            return Err(PlanError::Version { found: version });
        }
        let found: Inputs = serde_json::from_str(text).map_err(wrong)?;
        let options = Options { fan_out: found.fan_out, timeout: found.timeout };
        let plan = Self::new(found.source, found.destination, &found.placement, options)?;
        let contradicts = |what: &str| PlanError::Contradicts { what: what.to_owned() };
        if found.layout != plan.layout() {
            return Err(contradicts("layout"));
        }
        if found.fingerprint != plan.fingerprint() {
            return Err(contradicts("fingerprint"));
        }
        if found.cost != plan.cost() {
            return Err(contradicts("cost"));
        }
        // The steps are read one by one, and none is kept.
        let difference = Cell::new(None);
        let mut reader = serde_json::Deserializer::from_str(text);
        let read = CheckedPlan { plan: &plan, difference: &difference }.deserialize(&mut reader);
        match (difference.take(), read) {
            (Some(what), _) => Err(PlanError::Contradicts { what }),
            (None, Err(error)) => Err(wrong(error)),
            (None, Ok(())) => Ok(plan),
        }
    }
}

impl Serialize for Plan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut plan = serializer.serialize_struct("Plan", 10)?;
        plan.serialize_field("version", &PLAN_VERSION)?;
        plan.serialize_field("fingerprint", &self.fingerprint())?;
        plan.serialize_field("layout", &self.layout())?;
        plan.serialize_field("fan_out", &self.options.fan_out)?;
        plan.serialize_field(
            "timeout",
            &self.options.timeout.map(|timeout| humantime::format_duration(timeout).to_string()),
        )?;
        plan.serialize_field("source", &self.source)?;
        plan.serialize_field("destination", &self.destination)?;
        plan.serialize_field("placement", &self.placement)?;
        plan.serialize_field("cost", &self.cost())?;
        plan.serialize_field("steps", &Steps(self))?;
        plan.end()
    }
}

struct Steps<'a>(&'a Plan);

impl Serialize for Steps<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.steps())
    }
}

#[derive(Deserialize)]
struct Version {
    version: u64,
}

/// Everything but the steps.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Inputs {
    #[serde(rename = "version")]
    _version: u64,
    fingerprint: Fingerprint,
    layout: Fingerprint,
    fan_out: NonZeroU32,
    #[serde(with = "humantime_serde")]
    timeout: Option<Duration>,
    source: ArrayDescription,
    destination: ArrayDescription,
    placement: Placement,
    cost: Cost,
    #[serde(rename = "steps")]
    _steps: IgnoredAny,
}

/// Reads a plan for its steps, and compares each with the one that it should be.
struct CheckedPlan<'a> {
    plan: &'a Plan,
    difference: &'a Cell<Option<String>>,
}

struct CheckedSteps<'a>(CheckedPlan<'a>);

impl<'de> DeserializeSeed<'de> for CheckedPlan<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for CheckedPlan<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a plan")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        while let Some(key) = fields.next_key::<String>()? {
            if key == "steps" {
                let Self { plan, difference } = self;
                fields.next_value_seed(CheckedSteps(CheckedPlan { plan, difference }))?;
            } else {
                fields.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for CheckedSteps<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for CheckedSteps<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the steps of a plan")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut steps: A) -> Result<(), A::Error> {
        let CheckedPlan { plan, difference } = self.0;
        let differs = |what: String| {
            difference.set(Some(what));
            A::Error::custom("differs")
        };
        for wanted in plan.steps() {
            match steps.next_element::<Step>()? {
                Some(found) if found == wanted => {}
                Some(_) => return Err(differs(format!("step {}", wanted.index))),
                None => {
                    return Err(differs(format!("number of steps (it ends before step {})", wanted.index)));
                }
            }
        }
        match steps.next_element::<IgnoredAny>()? {
            Some(_) => Err(differs(format!("number of steps (it has more than {})", plan.len()))),
            None => Ok(()),
        }
    }
}
