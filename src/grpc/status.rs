//! Encodes failures: grpc-status, grpc-message, and the error details that clients interpret.
//!
//! The module that refuses a call chooses the status code. Begin at `put_failure_headers`.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use prost::Message as _;
use prost::encoding::encode_varint;

use super::dialect::Dialect;
use crate::coordination::{Failure, ServiceErrorMark};
use crate::proto::{CoordinatedTask, tensorflow, xla::coordination};

pub(super) static STATUS: HeaderName = HeaderName::from_static("grpc-status");
static MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
static DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

const SERVICE_ERROR: &str = "type.googleapis.com/tensorflow.CoordinationServiceError";
const BARRIER_ERROR: &str = "type.googleapis.com/tensorflow.BarrierError";
const MISMATCH_ERROR: &str = "type.googleapis.com/tensorflow.ServiceMismatchError";

/// The length to which texts are cut; the C++ service cuts them there too.
const TEXT_BYTES: usize = 3072;
const TRUNCATION_MARK: &str = " ... [truncated]";
/// The size of text and details together. Clients refuse header lists of 16 KiB.
const LIST_BYTES: usize = 15 << 10;
/// The size of the details; longer ones are omitted, except the mark of the service's own statements.
const DETAILS_BYTES: usize = 8 << 10;

/// The bytes that are escaped in a grpc-message: everything but printable ASCII, and the escape itself.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// Adds the status of a failed call to `headers`.
pub(super) fn put_failure_headers(headers: &mut HeaderMap, failure: &Failure, dialect: Dialect) {
    let code = match failure.code.number() {
        known @ 1..=16 => known,
        _ => 2,
    };
    headers.insert(&STATUS, HeaderValue::from(code));
    let details = encode_error_details(failure, dialect);
    let left = LIST_BYTES.saturating_sub(details.as_ref().map_or(0, HeaderValue::len));
    // Percent-encoding leaves only bytes that a header value may have.
    if let Ok(text) = HeaderValue::from_str(&escape_header_value(&failure.message, left)) {
        headers.insert(&MESSAGE, text);
    }
    if let Some(details) = details {
        headers.insert(&DETAILS, details);
    }
}

/// Returns the text as a header value of at most `left` bytes.
fn escape_header_value(text: &str, left: usize) -> Cow<'_, str> {
    let kept = text.get(..text.floor_char_boundary(TEXT_BYTES)).unwrap_or(text);
    let escaped: Cow<'_, str> = utf8_percent_encode(kept, ESCAPED).into();
    if kept.len() == text.len() && escaped.len() <= left {
        return escaped;
    }
    let mut cut = String::with_capacity(left.min(escaped.len()) + TRUNCATION_MARK.len());
    let room = left.saturating_sub(TRUNCATION_MARK.len());
    for character in kept.chars() {
        let mut buffer = [0; 4];
        let before = cut.len();
        cut.extend(utf8_percent_encode(character.encode_utf8(&mut buffer), ESCAPED));
        if cut.len() > room {
            cut.truncate(before);
            break;
        }
    }
    cut.push_str(TRUNCATION_MARK);
    cut.into()
}

/// Returns the encoded payloads for their header; `None` if there are none.
fn encode_error_details(failure: &Failure, dialect: Dialect) -> Option<HeaderValue> {
    let mut container = Vec::new();
    if let Some(barrier) = &failure.barrier {
        let value =
            coordination::BarrierError { barrier_id: barrier.id.to_string(), counter: barrier.counter };
        append_details_payload(&mut container, BARRIER_ERROR, &value.encode_to_vec());
        if container.len() * 4 / 3 > DETAILS_BYTES {
            container.clear();
        }
    }
    if let Some(error) = failure.service_error {
        append_details_payload(&mut container, SERVICE_ERROR, &encode_service_error(error, dialect));
    }
    if let Some(incarnation) = failure.service_mismatch {
        let value = coordination::ServiceMismatchError { service_incarnation: incarnation.0 };
        append_details_payload(&mut container, MISMATCH_ERROR, &value.encode_to_vec());
    }
    if container.is_empty() {
        return None;
    }
    HeaderValue::from_maybe_shared(bytes::Bytes::from(STANDARD_NO_PAD.encode(container))).ok()
}

/// Appends one entry to a map of payloads. An empty value is written too, as the C++ service does.
fn append_details_payload(container: &mut Vec<u8>, key: &str, value: &[u8]) {
    let mut entry = Vec::with_capacity(key.len() + value.len() + 8);
    for (tag, part) in [(0x0a, key.as_bytes()), (0x12, value)] {
        entry.push(tag);
        encode_varint(part.len() as u64, &mut entry);
        entry.extend_from_slice(part);
    }
    container.push(0x0a);
    encode_varint(entry.len() as u64, container);
    container.extend_from_slice(&entry);
}

fn encode_service_error(error: ServiceErrorMark, dialect: Dialect) -> Vec<u8> {
    match dialect {
        Dialect::Number => coordination::CoordinationServiceError {
            is_reported_error: error.reported,
            source_task_id: error.source.map_or(0, |task| task.0),
        }
        .encode_to_vec(),
        Dialect::Named | Dialect::Unnamed => tensorflow::CoordinationServiceError {
            is_reported_error: error.reported,
            source_task: error.source.map(|task| to_coordinated_task(task.0, dialect)),
        }
        .encode_to_vec(),
    }
}

/// Returns a task in generation A's encoding.
pub(super) fn to_coordinated_task(task_id: i32, dialect: Dialect) -> CoordinatedTask {
    CoordinatedTask { named: dialect == Dialect::Named, task_id, recoverable: false }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::coordination::{Code, ServiceIncarnation, TaskId};

    fn failure_headers(failure: &Failure, dialect: Dialect) -> HeaderMap {
        let mut headers = HeaderMap::new();
        put_failure_headers(&mut headers, failure, dialect);
        headers
    }

    fn decoded_error_details(failure: &Failure, dialect: Dialect) -> Vec<u8> {
        STANDARD_NO_PAD.decode(&failure_headers(failure, dialect)[&DETAILS]).unwrap()
    }

    fn payload_entry(key: &str, value: &[u8]) -> Vec<u8> {
        let inner =
            [&[0x0a, key.len() as u8][..], key.as_bytes(), &[0x12, value.len() as u8], value].concat();
        [&[0x0a, inner.len() as u8][..], &inner].concat()
    }

    #[test]
    fn an_error_about_the_callers_own_call() {
        let failure = Failure::from_service(Code::Aborted, "no");
        for dialect in [Dialect::Named, Dialect::Unnamed, Dialect::Number] {
            assert_eq!(decoded_error_details(&failure, dialect), payload_entry(SERVICE_ERROR, b""));
        }
        let headers = failure_headers(&failure, Dialect::Number);
        assert_eq!(headers[&STATUS], "10");
        assert_eq!(headers[&MESSAGE], "no");
    }

    #[test]
    fn the_task_that_an_error_came_from() {
        let failure = Failure::without_details(Code::Aborted, "").with_source(TaskId(2));
        let named = b"\x22\x0e\x0a\x0ajax_worker\x10\x02";
        assert_eq!(decoded_error_details(&failure, Dialect::Named), payload_entry(SERVICE_ERROR, named));
        assert_eq!(
            decoded_error_details(&failure, Dialect::Unnamed),
            payload_entry(SERVICE_ERROR, b"\x22\x02\x10\x02")
        );
        assert_eq!(
            decoded_error_details(&failure, Dialect::Number),
            payload_entry(SERVICE_ERROR, b"\x20\x02")
        );

        let mut reported = Failure::without_details(Code::Aborted, "").with_source(TaskId(0));
        reported.service_error.as_mut().unwrap().reported = true;
        assert_eq!(
            decoded_error_details(&reported, Dialect::Unnamed),
            payload_entry(SERVICE_ERROR, b"\x18\x01\x22\x00")
        );
        assert_eq!(
            decoded_error_details(&reported, Dialect::Number),
            payload_entry(SERVICE_ERROR, b"\x18\x01")
        );
    }

    #[test]
    fn barriers_and_mismatches() {
        let failure = Failure::without_details(Code::Internal, "").with_barrier(&Arc::from("b"), 3);
        let expected =
            [payload_entry(BARRIER_ERROR, b"\x0a\x01b\x10\x03"), payload_entry(SERVICE_ERROR, b"")].concat();
        assert_eq!(decoded_error_details(&failure, Dialect::Number), expected);

        let mut failure = Failure::from_service(Code::Internal, "");
        failure.service_mismatch = Some(ServiceIncarnation(0x0102_0304_0506_0708));
        let mismatch = payload_entry(MISMATCH_ERROR, &[9, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(
            decoded_error_details(&failure, Dialect::Number),
            [payload_entry(SERVICE_ERROR, b""), mismatch].concat()
        );
    }

    #[test]
    fn no_payload_no_header() {
        let headers = failure_headers(
            &Failure::without_details(Code::AlreadyExists, "key k already exists."),
            Dialect::Named,
        );
        assert!(!headers.contains_key(&DETAILS));
        assert_eq!(headers[&STATUS], "6");
    }

    #[test]
    fn unknown_codes_are_unknown() {
        for code in [Code::Other(77), Code::Other(-3), Code::Unknown] {
            assert_eq!(failure_headers(&Failure::without_details(code, ""), Dialect::Number)[&STATUS], "2");
        }
    }

    #[test]
    fn text_is_escaped_and_cut() {
        assert_eq!(escape_header_value("100 %\n\u{e4}\u{7f}~", 1000), "100 %25%0A%C3%A4%7F~");
        let exact = "x".repeat(TEXT_BYTES);
        assert_eq!(escape_header_value(&exact, LIST_BYTES), exact);
        assert_eq!(
            escape_header_value(&format!("{exact}y"), LIST_BYTES),
            format!("{exact}{TRUNCATION_MARK}")
        );
        // Never within a character.
        let odd = format!("x{}", "\u{e4}".repeat(TEXT_BYTES));
        assert_eq!(
            escape_header_value(&odd, LIST_BYTES).len(),
            1 + (TEXT_BYTES - 1) / 2 * 6 + TRUNCATION_MARK.len()
        );
        assert_eq!(
            escape_header_value("\u{20ac}\u{20ac}\u{20ac}", 9 + TRUNCATION_MARK.len()),
            format!("%E2%82%AC{TRUNCATION_MARK}")
        );
    }

    #[test]
    fn the_header_list_stays_below_what_clients_take() {
        let id: Arc<str> = "\u{20ac}".repeat(1365).into();
        for id in [id, "b".repeat(100_000).into()] {
            let failure =
                Failure::without_details(Code::Internal, "\u{20ac}".repeat(9999)).with_barrier(&id, 1);
            let headers = failure_headers(&failure, Dialect::Named);
            let list: usize =
                headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum();
            assert!(list + 200 < 16 << 10, "{list}");
            assert!(headers.contains_key(&DETAILS));
        }
    }
}
