//! Answers of both generations of the protocol in one form, with the status payloads decoded.

use muster::proto::tensorflow::distributed_runtime::GrpcPayloadContainer;
use muster::proto::{tensorflow, xla::coordination as xla};
use prost::Message as _;

use super::call::Generation;

/// The type names of status payloads.
pub const SERVICE_ERROR: &str = "type.googleapis.com/tensorflow.CoordinationServiceError";
pub const BARRIER_ERROR: &str = "type.googleapis.com/tensorflow.BarrierError";
pub const MISMATCH_ERROR: &str = "type.googleapis.com/tensorflow.ServiceMismatchError";

/// The outcome of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The status code by its number; 0 for success.
    pub code: i32,
    /// The status message.
    pub message: String,
    /// The decoded status payloads.
    pub payloads: Payloads,
    /// The body of a successful answer.
    pub body: Body,
    /// No service sent this: the transport failed, or the answer was invalid.
    pub transport: bool,
}

/// The decoded body of a successful answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    Nothing,
    Service(u64),
    Value {
        key: String,
        value: Vec<u8>,
    },
    Directory {
        name: String,
        entries: Vec<(String, Vec<u8>)>,
    },
    Barrier(i64),
    /// The live tasks and their incarnations, by ascending task.
    Alive(Vec<(i32, Option<u64>)>),
    States {
        version: i64,
        tasks: Vec<TaskState>,
    },
    Devices {
        service: u64,
        devices: Vec<Vec<u8>>,
    },
}

/// One task as the service describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskState {
    pub task: i32,
    /// 2 disconnected, 3 connected, 4 in error.
    pub state: i32,
    pub incarnation: u64,
    pub error_code: i32,
    pub error_message: String,
    pub error: Option<ServiceError>,
}

/// `CoordinationServiceError`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceError {
    pub reported: bool,
    /// The task from which the error came. Generation C does not distinguish task 0 from none: it reads as
    /// `None`.
    pub source: Option<i32>,
}

/// The payloads of an error.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Payloads {
    pub service_error: Option<ServiceError>,
    /// The id and counter of the barrier instance that failed.
    pub barrier: Option<(String, i64)>,
    /// The service incarnation that the caller should have sent.
    pub mismatch: Option<u64>,
    /// Other payloads: type names, or text that could not be decoded.
    pub others: Vec<String>,
    /// The raw bytes of each value, by type name.
    pub raw: Vec<(String, Vec<u8>)>,
}

impl Answer {
    /// Returns a successful answer.
    pub fn ok(body: Body) -> Self {
        Self { code: 0, message: String::new(), payloads: Payloads::default(), body, transport: false }
    }

    /// Returns whether the call succeeded.
    pub fn is_ok(&self) -> bool {
        self.code == 0
    }

    /// Returns an error in the form of the client library.
    pub fn from_status(generation: Generation, status: &tonic::Status) -> Self {
        Self {
            code: i32::from(status.code()),
            message: status.message().to_owned(),
            payloads: Payloads::decode(generation, status.details()),
            body: Body::Nothing,
            transport: std::error::Error::source(status).is_some(),
        }
    }
}

impl Payloads {
    /// Decodes the content of `grpc-status-details-bin`.
    pub fn decode(generation: Generation, details: &[u8]) -> Self {
        let mut payloads = Self::default();
        let container = match GrpcPayloadContainer::decode(details) {
            Ok(container) => container,
            Err(error) => {
                payloads.others.push(format!("not a payload container: {error}"));
                return payloads;
            }
        };
        for (name, value) in container.payloads {
            let known = match name.as_str() {
                SERVICE_ERROR => decode_service_error(generation, &value)
                    .map(|error| payloads.service_error = Some(error))
                    .is_some(),
                BARRIER_ERROR => tensorflow::BarrierError::decode(value.clone())
                    .map(|error| payloads.barrier = Some((error.barrier_id, error.counter)))
                    .is_ok(),
                MISMATCH_ERROR => xla::ServiceMismatchError::decode(value.clone())
                    .map(|error| payloads.mismatch = Some(error.service_incarnation))
                    .is_ok(),
                _ => false,
            };
            if !known {
                payloads.others.push(name.clone());
            }
            payloads.raw.push((name, value.to_vec()));
        }
        payloads
    }
}

fn decode_service_error(generation: Generation, value: &[u8]) -> Option<ServiceError> {
    match generation {
        Generation::A => {
            let error = tensorflow::CoordinationServiceError::decode(value).ok()?;
            Some(error.into())
        }
        Generation::C => {
            let error = xla::CoordinationServiceError::decode(value).ok()?;
            Some(error.into())
        }
    }
}

impl From<tensorflow::CoordinationServiceError> for ServiceError {
    fn from(error: tensorflow::CoordinationServiceError) -> Self {
        Self { reported: error.is_reported_error, source: error.source_task.map(|task| task.task_id) }
    }
}

impl From<xla::CoordinationServiceError> for ServiceError {
    fn from(error: xla::CoordinationServiceError) -> Self {
        let source = (error.source_task_id != 0).then_some(error.source_task_id);
        Self { reported: error.is_reported_error, source }
    }
}

/// Returns the name of a status code.
pub fn code_name(code: i32) -> &'static str {
    const NAMES: [&str; 17] = [
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    ];
    usize::try_from(code).ok().and_then(|code| NAMES.get(code)).copied().unwrap_or("no code at all")
}
