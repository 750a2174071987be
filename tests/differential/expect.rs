//! What a script expects of an answer.

use crate::differences::Difference;
use crate::support::answer::code_name;
use crate::support::{Answer, Body, Generation};

/// What both services, or each of them, must do with a call.
#[derive(Debug, Clone)]
pub enum Expected {
    /// Both do this, and their whole answers are compared besides.
    Same(Outcome),
    /// They differ on purpose.
    Differs { difference: Difference, cxx: Outcome, muster: Outcome },
}

/// How a call stands.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// It waits.
    Waits,
    /// It is answered like this.
    Answered(Pattern),
    /// The service is gone without an answer.
    ServiceDied,
}

/// What an answer must say.
#[derive(Debug, Clone)]
pub struct Pattern {
    code: i32,
    says: Vec<&'static str>,
    /// The service marks the error as its own word.
    service_error: bool,
    source: Option<i32>,
    reported: bool,
    barrier: Option<(&'static str, i64)>,
    mismatch: bool,
    body: Option<BodyPattern>,
}

#[derive(Debug, Clone)]
enum BodyPattern {
    Value(Vec<u8>),
    Key(&'static str),
    Entries(Vec<(&'static str, &'static str)>),
    Counter(i64),
    Alive(Vec<(i32, u64)>),
    States(Vec<(i32, State)>),
    Devices(Vec<&'static str>),
}

/// The states of tasks that clients know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Disconnected = 2,
    Connected = 3,
    Error = 4,
}

/// The status codes that services answer with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
}

/// The call goes on waiting.
pub fn waits() -> Outcome {
    Outcome::Waits
}

/// Success.
pub fn ok() -> Outcome {
    Outcome::Answered(Pattern {
        code: 0,
        says: Vec::new(),
        service_error: false,
        source: None,
        reported: false,
        barrier: None,
        mismatch: false,
        body: None,
    })
}

/// An error in the service's own words, about the caller's own call.
pub fn error(code: Code) -> Outcome {
    ok().with(|pattern| {
        pattern.code = code as i32;
        pattern.service_error = true;
    })
}

/// What a heartbeat of another life than the registered one does to a job whose tasks do not come back.
pub fn another_life() -> Outcome {
    error(Code::Aborted).says("Incarnation ID mismatch")
}

/// An error without payloads, which clients read like one of the transport.
pub fn plain_error(code: Code) -> Outcome {
    ok().with(|pattern| pattern.code = code as i32)
}

impl Outcome {
    fn with(mut self, change: impl FnOnce(&mut Pattern)) -> Self {
        if let Self::Answered(pattern) = &mut self {
            change(pattern);
        }
        self
    }

    fn body(self, body: BodyPattern) -> Self {
        self.with(|pattern| pattern.body = Some(body))
    }

    /// The message holds these words, which people search their logs for.
    pub fn says(self, words: &'static str) -> Self {
        self.with(|pattern| pattern.says.push(words))
    }

    /// The error names the task that it came from.
    pub fn about_task(self, task: i32) -> Self {
        self.with(|pattern| pattern.source = Some(task))
    }

    /// The error was reported by a task itself.
    pub fn reported(self) -> Self {
        self.with(|pattern| pattern.reported = true)
    }

    /// The error names the barrier instance that failed.
    pub fn of_barrier(self, id: &'static str, counter: i64) -> Self {
        self.with(|pattern| pattern.barrier = Some((id, counter)))
    }

    /// The error says to which service incarnation the caller should speak.
    pub fn mismatch(self) -> Self {
        self.with(|pattern| pattern.mismatch = true)
    }

    pub fn value(self, value: impl AsRef<[u8]>) -> Self {
        self.body(BodyPattern::Value(value.as_ref().to_vec()))
    }

    /// The answer spells its key like this.
    pub fn key(self, key: &'static str) -> Self {
        self.body(BodyPattern::Key(key))
    }

    pub fn entries(self, entries: &[(&'static str, &'static str)]) -> Self {
        self.body(BodyPattern::Entries(entries.to_vec()))
    }

    pub fn counter(self, counter: i64) -> Self {
        self.body(BodyPattern::Counter(counter))
    }

    /// These tasks are alive, each in this life.
    pub fn alive(self, alive: &[(i32, usize)]) -> Self {
        let alive = alive.iter().map(|&(task, life)| (task, crate::script::incarnation(task, life)));
        self.body(BodyPattern::Alive(alive.collect()))
    }

    pub fn states(self, states: &[(i32, State)]) -> Self {
        self.body(BodyPattern::States(states.to_vec()))
    }

    pub fn devices(self, devices: &[&'static str]) -> Self {
        self.body(BodyPattern::Devices(devices.to_vec()))
    }

    /// What is wrong with this answer, or with there being none.
    pub fn objection(&self, generation: Generation, answer: Option<&Answer>) -> Option<String> {
        match (self, answer) {
            (Self::Waits, None) => None,
            (Self::Waits, Some(answer)) => {
                Some(format!("should wait, but was answered {}", describe(answer)))
            }
            (_, None) => Some("should have been answered, but waits".into()),
            (Self::ServiceDied, Some(answer)) => (!answer.transport).then(|| {
                format!("should have found the service dead, but was answered {}", describe(answer))
            }),
            (Self::Answered(pattern), Some(answer)) => pattern
                .objection(generation, answer)
                .map(|why| format!("{why}; the answer was {}", describe(answer))),
        }
    }
}

impl Pattern {
    fn objection(&self, generation: Generation, answer: &Answer) -> Option<String> {
        if answer.transport {
            return Some("no service answered".into());
        }
        if answer.code != self.code {
            return Some(format!("should be {}", code_name(self.code)));
        }
        if let Some(words) = self.says.iter().find(|words| !answer.message.contains(**words)) {
            return Some(format!("should say {words:?}"));
        }
        let payloads = &answer.payloads;
        if !payloads.others.is_empty() {
            return Some("should have no payload that clients do not know".into());
        }
        if payloads.service_error.is_some() != self.service_error {
            let not = if self.service_error { "" } else { "not " };
            return Some(format!("should {not}have a CoordinationServiceError"));
        }
        // Generation C cannot tell task 0 from none.
        let source = self.source.filter(|&task| generation == Generation::A || task != 0);
        if let Some(error) = payloads.service_error
            && (error.source != source || error.reported != self.reported)
        {
            let reported = if self.reported { "a report " } else { "" };
            return Some(format!("should be {reported}from task {source:?}"));
        }
        let barrier = payloads.barrier.as_ref().map(|(id, counter)| (id.as_str(), *counter));
        let agrees = match (barrier, self.barrier) {
            (None, None) => true,
            // The id of the shutdown barrier ends in the service incarnation.
            (Some((id, counter)), Some((wanted, n))) => {
                counter == n && (id == wanted || (wanted.ends_with("::") && id.starts_with(wanted)))
            }
            _ => false,
        };
        if !agrees {
            return Some(format!("should be about barrier {:?}", self.barrier));
        }
        if payloads.mismatch.is_some() != self.mismatch {
            return Some("a ServiceMismatchError is missing or too many".into());
        }
        self.body.as_ref().and_then(|body| body.objection(&answer.body))
    }
}

impl BodyPattern {
    fn objection(&self, body: &Body) -> Option<String> {
        let agrees = match (self, body) {
            (Self::Value(wanted), Body::Value { value, .. }) => wanted == value,
            (Self::Key(wanted), Body::Value { key, .. }) => wanted == key,
            (Self::Entries(wanted), Body::Directory { entries, .. }) => {
                wanted.len() == entries.len()
                    && wanted
                        .iter()
                        .zip(entries)
                        .all(|((k, v), (key, value))| k == key && v.as_bytes() == value)
            }
            (Self::Counter(wanted), Body::Barrier(counter)) => wanted == counter,
            (Self::Alive(wanted), Body::Alive(alive)) => {
                let wanted = wanted.iter().map(|&(task, incarnation)| (task, Some(incarnation)));
                wanted.eq(alive.iter().copied())
            }
            (Self::States(wanted), Body::States { tasks, .. }) => {
                let wanted = wanted.iter().map(|&(task, state)| (task, state as i32));
                wanted.eq(tasks.iter().map(|task| (task.task, task.state)))
            }
            (Self::Devices(wanted), Body::Devices { devices, .. }) => {
                wanted.iter().map(|device| device.as_bytes()).eq(devices.iter().map(Vec::as_slice))
            }
            _ => false,
        };
        (!agrees).then(|| format!("should be {self:?}"))
    }
}

/// An answer in a line.
pub fn describe(answer: &Answer) -> String {
    let transport = if answer.transport { " (by the transport)" } else { "" };
    let code = code_name(answer.code);
    if answer.is_ok() {
        return format!("OK {:?}", answer.body);
    }
    let payloads = &answer.payloads;
    format!(
        "{code}{transport} {:?} service error {:?}, barrier {:?}, mismatch {:?}, others {:?}",
        answer.message, payloads.service_error, payloads.barrier, payloads.mismatch, payloads.others
    )
}
