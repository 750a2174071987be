//! Plans as JSON.
//!
//! The JSON of a plan holds its inputs, its steps and its cost. The reader does not trust the text. It makes the
//! plan again from the source, the destination, the placement and the options. Everything else in the text must
//! equal the result. So a plan from outside cannot write where a plan of this program would not write. The work of
//! the reader is proportional to the number of steps. Before this work, the reader checks that the text is long
//! enough for that number of steps. So a short text cannot cause much work. A plan that is written and read again is
//! the same plan. Begin at [`Plan::to_json`] and [`Plan::from_json`].

use std::cell::Cell;
use std::fmt;
use std::io;
use std::num::NonZeroU32;
use std::time::Duration;

use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeStruct as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::error::check_limit;
use super::limits::PLAN_VERSION;
use super::{
    ArrayDescription, BufferRole, Cost, DeviceId, Fingerprint, MAX_PLAN_TEXT, Placement, Plan, PlanError,
    PlanOptions, ShardRegion, Step, StepClass, StepEnd, StridedRuns, TaskId, TransferKey,
};

impl Plan {
    /// Returns the plan as JSON, on one line.
    ///
    /// # Errors
    /// Returns [`PlanError::TooLong`] if the text would be longer than the reader accepts; it writes at most
    /// that many bytes to find out.
    pub fn to_json(&self) -> Result<String, PlanError> {
        let json = |error| PlanError::json("the plan", &error);
        let too_long = PlanError::TooLong { steps: self.len() };
        let least = shortest_step_json_bytes(self.source().shape.len()).map_err(json)?;
        if self.len().saturating_mul(least) > MAX_PLAN_TEXT {
            return Err(too_long);
        }
        let mut text = BoundedWriter { text: Vec::new(), most: MAX_PLAN_TEXT };
        match serde_json::to_writer(&mut text, self) {
            Err(error) if error.is_io() => return Err(too_long),
            written => written.map_err(json)?,
        }
        let no_text = |_| PlanError::Json { what: "the plan", why: "it is no text".to_owned() };
        String::from_utf8(text.text).map_err(no_text)
    }

    /// Reads a plan that [`Plan::to_json`] wrote.
    ///
    /// # Errors
    /// Returns [`PlanError::Version`] for a plan of another version of the rules, [`PlanError::Contradicts`]
    /// for one whose steps do not follow from its inputs, and the errors of [`Plan::new`].
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        check_limit("bytes of the plan", text.len(), MAX_PLAN_TEXT)?;
        let wrong = |error| PlanError::json("the plan", &error);
        let FormatVersion { version } = serde_json::from_str(text).map_err(wrong)?;
        if version != PLAN_VERSION {
            return Err(PlanError::Version { found: version });
        }
        let found: PlanHeader = serde_json::from_str(text).map_err(wrong)?;
        let options = PlanOptions { fan_out: found.fan_out, timeout: found.timeout };
        let plan = Self::new(found.source, found.destination, &found.placement, options)?;
        let contradicts = |what: &str| PlanError::Contradicts { what: what.to_owned() };
        if found.layout != plan.layout_fingerprint() {
            return Err(contradicts("layout"));
        }
        if found.fingerprint != plan.fingerprint() {
            return Err(contradicts("fingerprint"));
        }
        // From here on the work grows with the number of steps, so a short text must not claim many.
        let least = shortest_step_json_bytes(plan.source().shape.len()).map_err(wrong)?;
        if found.steps.0 != plan.len() {
            let counted = format!("number of steps (it has {} of {})", found.steps.0, plan.len());
            return Err(contradicts(&counted));
        }
        if plan.len().saturating_mul(least) > text.len() {
            return Err(contradicts("list of steps (its text is too short for them)"));
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

/// A writer into a text of bounded length.
struct BoundedWriter {
    text: Vec<u8>,
    most: usize,
}

impl io::Write for BoundedWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > self.most {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns a lower bound of the length of a step's text, for arrays of `rank` dimensions.
fn shortest_step_json_bytes(rank: usize) -> serde_json::Result<usize> {
    let zeros = || vec![0; rank];
    let side = || StepEnd {
        device: DeviceId(0),
        task: TaskId(0),
        host: String::new(),
        buffer: BufferRole::Source,
        shape: zeros(),
        region: ShardRegion { start: zeros(), extent: zeros() },
        runs: StridedRuns { offset: 0, run_bytes: 0, counts: Vec::new(), strides: Vec::new() },
        staging: None,
    };
    let (source, destination) = (side(), side());
    let class = StepClass::SameHost;
    let step = Step { index: 0, key: TransferKey(0), class, bytes: 0, after: Some(0), source, destination };
    Ok(serde_json::to_string(&step)?.len())
}

impl Serialize for Plan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut plan = serializer.serialize_struct("Plan", 10)?;
        plan.serialize_field("version", &PLAN_VERSION)?;
        plan.serialize_field("fingerprint", &self.fingerprint())?;
        plan.serialize_field("layout", &self.layout_fingerprint())?;
        plan.serialize_field("fan_out", &self.options.fan_out)?;
        plan.serialize_field(
            "timeout",
            &self.options.timeout.map(|timeout| humantime::format_duration(timeout).to_string()),
        )?;
        plan.serialize_field("source", &self.source)?;
        plan.serialize_field("destination", &self.destination)?;
        plan.serialize_field("placement", &self.placement)?;
        plan.serialize_field("cost", &self.cost())?;
        plan.serialize_field("steps", &PlanSteps(self))?;
        plan.end()
    }
}

struct PlanSteps<'a>(&'a Plan);

impl Serialize for PlanSteps<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.steps())
    }
}

#[derive(Deserialize)]
struct FormatVersion {
    version: u64,
}

/// All fields of a plan but the steps, of which only the number is read.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanHeader {
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
    steps: ListLength,
}

/// The number of entries of a list.
struct ListLength(usize);

impl<'de> Deserialize<'de> for ListLength {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Self(0))
    }
}

impl<'de> Visitor<'de> for ListLength {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the steps of a plan")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<Self, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {
            self.0 += 1;
        }
        Ok(self)
    }
}

/// Reads the steps of a plan, and compares each with the step that the plan has.
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
        let differs = |step: usize| {
            difference.set(Some(format!("step {step}")));
            A::Error::custom("differs")
        };
        let mut wanted = plan.steps();
        let mut number = 0;
        while let Some(found) = steps.next_element::<Step>()? {
            if wanted.next() != Some(found) {
                return Err(differs(number));
            }
            number += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::super::{Dtype, Mesh, PartitionSpec, Sharding};
    use super::*;

    #[test]
    fn no_step_is_shorter_than_the_shortest() {
        let array = |shape: &[u64], spec: &[&[&str]]| {
            let sharding = Sharding { mesh: Mesh::new(&[("x", 4)], 0..4), spec: PartitionSpec::new(spec) };
            ArrayDescription { shape: shape.to_vec(), dtype: Dtype::Uint8, sharding }
        };
        for (shape, spec) in [(&[8, 8][..], &[&[][..], &["x"]][..]), (&[4], &[&[]]), (&[], &[])] {
            let placement = Placement::blocks((0..4).map(DeviceId), 2, 1);
            let plan = Plan::new(
                array(shape, &[&["x"][..]][..shape.len().min(1)]),
                array(shape, spec),
                &placement,
                PlanOptions::default(),
            );
            let plan = plan.expect("it makes sense");
            let least = shortest_step_json_bytes(shape.len()).expect("it can be written");
            assert!(!plan.is_empty());
            for step in plan.steps() {
                let text = serde_json::to_string(&step).expect("it can be written");
                assert!(text.len() >= least && least > 300, "{least} for {text}");
            }
        }
    }

    #[test]
    fn a_text_becomes_no_longer_than_it_may() {
        let mut text = BoundedWriter { text: Vec::new(), most: 5 };
        assert!(text.write_all(b"12345").is_ok());
        assert!(text.write_all(b"6").is_err());
        assert_eq!(text.text, b"12345");
    }
}
