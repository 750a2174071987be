//! The parts of a request head that are kept for the call: target, timeout, compression, authority, trace context.
//!
//! `http2::request_head` validates request heads, and `job_resolver.rs` finds the job. Begin at [`RequestMeta`].

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap};

use super::decoded_call::RequestDecoder;
use super::dialect::{GENERATION_A_SERVICE, GENERATION_C_SERVICE, PEER_JOBS_SERVICE};
use super::peer_jobs_service::{self, PeerQuestionDecoder};
use super::{
    collectives_service, generation_a, generation_c, stacks_service, task_claims_service, transfers_service,
};
use crate::coordination::{Code, Failure};
use crate::http2::{FromRequestHead, RequestHead};

/// The parts of a request head that the call needs.
#[derive(Debug)]
pub(super) struct RequestMeta {
    pub(super) target: Result<RequestTarget, RequestRefusal>,
    /// The time for which the caller waits, if the head states it.
    pub(super) timeout: Option<Duration>,
    /// Whether compressed messages are announced.
    pub(super) compresses: bool,
    /// The name that the client dialled.
    pub(super) authority: Box<str>,
    /// The trace context fields.
    pub(super) trace: Option<Box<HeaderMap>>,
    /// The path of a call.
    pub(super) path: Arc<str>,
    content_length: Option<u64>,
}

impl From<RequestHead> for RequestMeta {
    fn from(head: RequestHead) -> Self {
        let target = request_target(&head);
        let timeout = parse_timeout(&head.fields);
        let compresses = announces_gzip(&head.fields);
        let mut trace = HeaderMap::new();
        for name in TRACE_FIELDS {
            if let Some(value) = head.fields.get(name).filter(|value| value.len() <= TRACE_BYTES) {
                trace.insert(name, value.clone());
            }
        }
        let trace = (!trace.is_empty()).then(|| Box::new(trace));
        let path = match target {
            Ok(RequestTarget::Call(_)) => Arc::from(head.path.as_str()),
            _ => Arc::default(),
        };
        let target = match target {
            Ok(RequestTarget::Auxiliary(_)) => {
                Ok(RequestTarget::Auxiliary(Box::new((head.path, head.fields))))
            }
            target => target,
        };
        let authority = head.authority.into_boxed_str();
        Self { target, timeout, compresses, authority, trace, path, content_length: head.content_length }
    }
}

impl FromRequestHead for RequestMeta {
    fn content_length(&self) -> Option<u64> {
        self.content_length
    }
}

impl RequestMeta {
    /// Returns its approximate memory in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        let fields = |map: &HeaderMap| {
            map.iter().map(|(name, value)| name.as_str().len() + value.len() + FIELD_BYTES).sum::<usize>()
        };
        let target = match &self.target {
            Ok(RequestTarget::Auxiliary(request)) => request.0.len() + fields(&request.1),
            Ok(RequestTarget::Call(_)) => 0,
            Err(_) => REFUSAL_BYTES,
        };
        size_of::<Self>()
            + self.authority.len()
            + self.path.len()
            + self.trace.as_deref().map_or(0, fields)
            + target
    }
}

/// The fields of the W3C trace context.
const TRACE_FIELDS: [&str; 2] = ["traceparent", "tracestate"];
/// The length beyond which such a field is dropped.
const TRACE_BYTES: usize = 512;
/// The longest authority; a name in the DNS has 253 bytes.
const AUTHORITY_MAX: usize = 512;
/// The memory of a header field beside its text; also that of a refusal.
const FIELD_BYTES: usize = 160;
const REFUSAL_BYTES: usize = 512;

/// The target of a request.
#[derive(Debug)]
pub(super) enum RequestTarget {
    /// A call that this port answers itself.
    Call(CallHandler),
    /// A call to an auxiliary service, with its path and its fields.
    Auxiliary(Box<(String, HeaderMap)>),
}

/// The handler of a call.
#[derive(Debug, Clone, Copy)]
pub(super) enum CallHandler {
    /// The coordination service, of either generation.
    Coordination(RequestDecoder),
    /// The reports that workers send about their transfers.
    Reports,
    /// The stack answers of workers.
    Stacks,
    /// The reports of processes on their collectives.
    Collectives,
    /// The claims of processes on a task id.
    Claims,
    /// The questions of tasks about other jobs.
    PeerJobs(PeerQuestionDecoder),
}

/// The reason for which a request has no target.
#[derive(Debug)]
pub(super) enum RequestRefusal {
    /// It is not a gRPC call.
    Http(StatusCode, Failure),
    /// It is a call that this server does not know.
    Call(Failure),
    /// Its compression is unknown.
    Encoding(Failure),
}

const AUXILIARY: [&str; 2] = ["/grpc.health.", "/grpc.reflection."];

/// Returns the target of a request.
fn request_target(head: &RequestHead) -> Result<RequestTarget, RequestRefusal> {
    if head.method != "POST" {
        let shown = head.method.get(..head.method.floor_char_boundary(20)).unwrap_or_default();
        let text = format!("gRPC calls use POST, not {shown}");
        return Err(RequestRefusal::Http(
            StatusCode::METHOD_NOT_ALLOWED,
            Failure::without_details(Code::Unimplemented, text),
        ));
    }
    if !has_grpc_content_type(&head.fields) {
        let text = "the content-type must be application/grpc or application/grpc+proto";
        return Err(RequestRefusal::Http(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Failure::without_details(Code::Unimplemented, text),
        ));
    }
    if head.authority.len() > AUTHORITY_MAX {
        let text = format!("the name that was dialled has more than {AUTHORITY_MAX} bytes");
        return Err(RequestRefusal::Call(Failure::without_details(Code::InvalidArgument, text)));
    }
    let path = head.path.split_once('?').map_or(head.path.as_str(), |(path, _)| path);
    if AUXILIARY.iter().any(|service| path.starts_with(service)) {
        return Ok(RequestTarget::Auxiliary(Box::default()));
    }
    if let Some(callee) = call_handler(path) {
        return check_message_encoding(&head.fields).map(|()| RequestTarget::Call(callee));
    }
    let shown = path.get(..path.floor_char_boundary(200)).unwrap_or_default();
    Err(RequestRefusal::Call(Failure::without_details(
        Code::Unimplemented,
        format!("this server has no method {shown}"),
    )))
}

/// Returns the handler of the calls with this path.
pub(super) fn call_handler(path: &str) -> Option<CallHandler> {
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    match path.strip_prefix('/').and_then(|path| path.split_once('/')) {
        Some((GENERATION_A_SERVICE, method)) => {
            generation_a::request_decoder(method).map(CallHandler::Coordination)
        }
        Some((GENERATION_C_SERVICE, method)) => {
            generation_c::request_decoder(method).map(CallHandler::Coordination)
        }
        Some((task_claims_service::SERVICE, task_claims_service::METHOD)) => Some(CallHandler::Claims),
        Some((PEER_JOBS_SERVICE, method)) => {
            peer_jobs_service::request_decoder(method).map(CallHandler::PeerJobs)
        }
        Some((transfers_service::SERVICE, transfers_service::METHOD)) => Some(CallHandler::Reports),
        Some((stacks_service::SERVICE, stacks_service::METHOD)) => Some(CallHandler::Stacks),
        Some((collectives_service::SERVICE, collectives_service::METHOD)) => Some(CallHandler::Collectives),
        _ => None,
    }
}

fn has_grpc_content_type(headers: &HeaderMap) -> bool {
    let Some(given) = headers.get(CONTENT_TYPE) else { return false };
    let Some(after) = given.as_bytes().strip_prefix(b"application/grpc") else { return false };
    matches!(after.strip_prefix(b"+proto").unwrap_or(after), [] | [b';', ..])
}

fn check_message_encoding(headers: &HeaderMap) -> Result<(), RequestRefusal> {
    match headers.get("grpc-encoding").map(|given| given.as_bytes()) {
        None | Some(b"identity" | b"gzip") => Ok(()),
        Some(other) => {
            let shown = String::from_utf8_lossy(other.get(..other.len().min(50)).unwrap_or_default());
            let text = format!("this server knows no message compression {shown:?}, only identity and gzip");
            Err(RequestRefusal::Encoding(Failure::without_details(Code::Unimplemented, text)))
        }
    }
}

fn announces_gzip(headers: &HeaderMap) -> bool {
    headers.get("grpc-encoding").is_some_and(|given| given.as_bytes() == b"gzip")
}

fn parse_timeout(headers: &HeaderMap) -> Option<Duration> {
    let (unit, number) = headers.get("grpc-timeout")?.as_bytes().split_last()?;
    // The protocol permits at most eight digits, with which the largest unit does not overflow.
    if !(1..=8).contains(&number.len()) || !number.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = number.iter().fold(0_u64, |number, digit| number * 10 + u64::from(digit - b'0'));
    Some(match unit {
        b'H' => Duration::from_secs(number * 3600),
        b'M' => Duration::from_secs(number * 60),
        b'S' => Duration::from_secs(number),
        b'm' => Duration::from_millis(number),
        b'u' => Duration::from_micros(number),
        b'n' => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request_head(method: &str, path: &str, headers: &[(&'static str, &str)]) -> RequestHead {
        let named = |(name, value): &(&'static str, &str)| {
            (http::HeaderName::from_static(name), value.parse().expect("a value"))
        };
        let mut head = RequestHead::default();
        (head.method, head.path) = (method.into(), path.into());
        head.fields = headers.iter().map(named).collect();
        head
    }

    const TYPE: (&str, &str) = ("content-type", "application/grpc");

    #[test]
    fn both_generations_and_the_others() {
        let path = |path| request_target(&request_head("POST", path, &[TYPE]));
        assert!(matches!(
            path("/tensorflow.CoordinationService/Heartbeat"),
            Ok(RequestTarget::Call(CallHandler::Coordination(_)))
        ));
        assert!(matches!(
            path("/xla.coordination.CoordinationService/WatchTasks"),
            Ok(RequestTarget::Call(CallHandler::Coordination(_)))
        ));
        assert!(matches!(path("/grpc.health.v1.Health/Check"), Ok(RequestTarget::Auxiliary(_))));
        for unknown in [
            "/",
            "/x",
            "/tensorflow.CoordinationService/",
            "/tensorflow.CoordinationService/WatchTasks",
            "/xla.coordination.CoordinationService/ResetTask",
            "/xla.coordination.CoordinationService/Heartbeat/x",
            "/xla.CoordinationService/Heartbeat",
        ] {
            let Err(RequestRefusal::Call(why)) = path(unknown) else { panic!("{unknown}") };
            assert_eq!(why.code, Code::Unimplemented);
        }
    }

    #[test]
    fn a_request_that_is_not_grpc_gets_an_http_status() {
        let path = "/xla.coordination.CoordinationService/Heartbeat";
        let status = |method, headers: &[_]| match request_target(&request_head(method, path, headers)) {
            Err(RequestRefusal::Http(status, _)) => status.as_u16(),
            Err(RequestRefusal::Encoding(_)) => 1,
            Err(RequestRefusal::Call(_)) => 2,
            Ok(_) => 0,
        };
        assert_eq!(status("GET", &[TYPE]), 405);
        assert_eq!(status("POST", &[]), 415);
        for (given, expected) in [
            ("application/grpc+proto", 0),
            ("application/grpc; x=y", 0),
            ("application/grpc;x=y", 0),
            ("application/grpc-web", 415),
            ("application/grpc+json", 415),
            ("text/html", 415),
        ] {
            assert_eq!(status("POST", &[("content-type", given)]), expected, "{given}");
        }
        assert_eq!(status("POST", &[TYPE, ("grpc-encoding", "gzip")]), 0);
        assert_eq!(status("POST", &[TYPE, ("grpc-encoding", "deflate")]), 1);
    }

    #[test]
    fn timeouts() {
        let given = |text| parse_timeout(&request_head("POST", "/", &[("grpc-timeout", text)]).fields);
        assert_eq!(given("50S"), Some(Duration::from_secs(50)));
        assert_eq!(given("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(given("7m"), Some(Duration::from_millis(7)));
        assert_eq!(given("12u"), Some(Duration::from_micros(12)));
        for bad in ["", "S", "1", "123456789S", "-1S", "1x", "1 S"] {
            assert_eq!(given(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_request_that_waits_keeps_little_of_its_head() {
        let mut long = request_head("POST", "/xla.coordination.CoordinationService/Heartbeat", &[TYPE]);
        for n in 0..100 {
            let name = http::HeaderName::try_from(format!("x-{n}")).expect("a name");
            long.fields.insert(name, "y".repeat(100).parse().expect("a value"));
        }
        long.fields.insert("traceparent", "z".repeat(600).parse().expect("a value"));
        assert!(RequestMeta::from(long.clone()).memory_bytes() < 300);
        long.authority = "a".repeat(AUTHORITY_MAX + 1);
        let refused = RequestMeta::from(long.clone());
        assert!(
            matches!(refused.target, Err(RequestRefusal::Call(why)) if why.code == Code::InvalidArgument)
        );
        long.authority.clear();
        long.path = "/grpc.health.v1.Health/Check".into();
        assert!(RequestMeta::from(long).memory_bytes() > 100 * 100);
    }
}
