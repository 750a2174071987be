//! The conditions that a script expects an answer to meet.

use crate::differences::Difference;
use crate::support::answer::code_name;
use crate::support::{Answer, Body, Generation};

/// The expected behaviour of one or both services for a call.
#[derive(Debug, Clone)]
pub enum Expected {
    /// Both services do this, and their complete answers are compared too.
    Same(ExpectedOutcome),
    /// The services differ on purpose.
    Differs { difference: Difference, cxx: ExpectedOutcome, muster: ExpectedOutcome },
}

/// The state of a call.
#[derive(Debug, Clone)]
pub enum ExpectedOutcome {
    /// The call waits.
    Waits,
    /// The call is answered like this.
    Answered(AnswerPattern),
    /// The service has ended without an answer.
    ServiceDied,
}

/// The required properties of an answer.
#[derive(Debug, Clone)]
pub struct AnswerPattern {
    code: i32,
    says: Vec<&'static str>,
    /// Whether the error has the mark of the service's own statements.
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
    States(Vec<(i32, ExpectedTaskState)>),
    Devices(Vec<&'static str>),
}

/// The task states that clients know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpectedTaskState {
    Disconnected = 2,
    Connected = 3,
    Error = 4,
}

/// The status codes of the services.
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

/// Returns the expectation of a waiting call.
pub fn waits() -> ExpectedOutcome {
    ExpectedOutcome::Waits
}

/// Returns the expectation of success.
pub fn ok() -> ExpectedOutcome {
    ExpectedOutcome::Answered(AnswerPattern {
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

/// Returns the expectation of an error that the service states about the caller's own call.
pub fn error(code: Code) -> ExpectedOutcome {
    ok().with_pattern_change(|pattern| {
        pattern.code = code as i32;
        pattern.service_error = true;
    })
}

/// Returns the expectation of a heartbeat of another incarnation in a fate-sharing job.
pub fn incarnation_mismatch_error() -> ExpectedOutcome {
    error(Code::Aborted).with_message_part("Incarnation ID mismatch")
}

/// Returns the expectation of an error without payloads, which clients read like a transport failure.
pub fn plain_error(code: Code) -> ExpectedOutcome {
    ok().with_pattern_change(|pattern| pattern.code = code as i32)
}

impl ExpectedOutcome {
    fn with_pattern_change(mut self, change: impl FnOnce(&mut AnswerPattern)) -> Self {
        if let Self::Answered(pattern) = &mut self {
            change(pattern);
        }
        self
    }

    fn body(self, body: BodyPattern) -> Self {
        self.with_pattern_change(|pattern| pattern.body = Some(body))
    }

    /// Requires these words in the message; people search their logs for them.
    pub fn with_message_part(self, words: &'static str) -> Self {
        self.with_pattern_change(|pattern| pattern.says.push(words))
    }

    /// Requires that the error names the task that caused it.
    pub fn about_task(self, task: i32) -> Self {
        self.with_pattern_change(|pattern| pattern.source = Some(task))
    }

    /// Requires that a task reported the error itself.
    pub fn reported_by_task(self) -> Self {
        self.with_pattern_change(|pattern| pattern.reported = true)
    }

    /// Requires that the error names the failed barrier instance.
    pub fn of_barrier(self, id: &'static str, counter: i64) -> Self {
        self.with_pattern_change(|pattern| pattern.barrier = Some((id, counter)))
    }

    /// Requires that the error names the present service incarnation.
    pub fn naming_service_incarnation(self) -> Self {
        self.with_pattern_change(|pattern| pattern.mismatch = true)
    }

    pub fn value(self, value: impl AsRef<[u8]>) -> Self {
        self.body(BodyPattern::Value(value.as_ref().to_vec()))
    }

    /// Requires this spelling of the key.
    pub fn key(self, key: &'static str) -> Self {
        self.body(BodyPattern::Key(key))
    }

    pub fn entries(self, entries: &[(&'static str, &'static str)]) -> Self {
        self.body(BodyPattern::Entries(entries.to_vec()))
    }

    pub fn counter(self, counter: i64) -> Self {
        self.body(BodyPattern::Counter(counter))
    }

    /// Requires these live tasks, each with this life.
    pub fn alive(self, alive: &[(i32, usize)]) -> Self {
        let alive = alive.iter().map(|&(task, life)| (task, crate::script::incarnation(task, life)));
        self.body(BodyPattern::Alive(alive.collect()))
    }

    pub fn states(self, states: &[(i32, ExpectedTaskState)]) -> Self {
        self.body(BodyPattern::States(states.to_vec()))
    }

    pub fn devices(self, devices: &[&'static str]) -> Self {
        self.body(BodyPattern::Devices(devices.to_vec()))
    }

    /// Returns what is wrong with this answer, or with its absence.
    pub fn mismatch_text(&self, generation: Generation, answer: Option<&Answer>) -> Option<String> {
        match (self, answer) {
            (Self::Waits, None) => None,
            (Self::Waits, Some(answer)) => {
                Some(format!("should wait, but was answered {}", describe_answer(answer)))
            }
            (_, None) => Some("should have been answered, but waits".into()),
            (Self::ServiceDied, Some(answer)) => (!answer.transport).then(|| {
                format!("should have found the service dead, but was answered {}", describe_answer(answer))
            }),
            (Self::Answered(pattern), Some(answer)) => pattern
                .mismatch_text(generation, answer)
                .map(|why| format!("{why}; the answer was {}", describe_answer(answer))),
        }
    }
}

impl AnswerPattern {
    fn mismatch_text(&self, generation: Generation, answer: &Answer) -> Option<String> {
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
        // Generation C cannot distinguish task 0 from none.
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
            // The id of the shutdown barrier ends with the service incarnation.
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
        self.body.as_ref().and_then(|body| body.mismatch_text(&answer.body))
    }
}

impl BodyPattern {
    fn mismatch_text(&self, body: &Body) -> Option<String> {
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

/// Returns an answer in one line.
pub fn describe_answer(answer: &Answer) -> String {
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
