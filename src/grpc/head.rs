//! What the header of a request says.

use std::time::Duration;

use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap};

use super::call::Reader;
use super::{generation_a, generation_c, reports};
use crate::coordination::{Code, Failure};
use crate::http2::Head;

/// The head of a request, and what it says.
#[derive(Debug)]
pub(super) struct Heading {
    pub(super) target: Result<Target, Refused>,
    /// How long the caller waits for the answer, if it says so.
    pub(super) timeout: Option<Duration>,
    /// Whether compressed messages are announced.
    pub(super) compresses: bool,
    pub(super) head: Head,
}

impl From<Head> for Heading {
    fn from(head: Head) -> Self {
        Self {
            target: target(&head),
            timeout: timeout(&head.fields),
            compresses: compresses(&head.fields),
            head,
        }
    }
}

/// Where a request is to go.
#[derive(Debug)]
pub(super) enum Target {
    /// A call that the wire edge answers itself.
    Call(Callee),
    /// A call to one of the other services.
    Side,
}

/// Who answers a call.
#[derive(Debug, Clone, Copy)]
pub(super) enum Callee {
    /// The coordination service, of either generation.
    Coordination(Reader),
    /// The board of what workers report of their transfers.
    Reports,
}

/// Why a request goes nowhere.
#[derive(Debug)]
pub(super) enum Refused {
    /// It is no gRPC call.
    Http(StatusCode, Failure),
    /// It is one that this server does not know.
    Call(Failure),
    /// Its compression is not known.
    Encoding(Failure),
}

const SIDE: [&str; 2] = ["/grpc.health.", "/grpc.reflection."];

/// Finds where a request is to go.
fn target(head: &Head) -> Result<Target, Refused> {
    if head.method != "POST" {
        let text = format!("gRPC calls use POST, not {}", head.method);
        return Err(Refused::Http(StatusCode::METHOD_NOT_ALLOWED, Failure::plain(Code::Unimplemented, text)));
    }
    if !is_grpc(&head.fields) {
        let text = "the content-type must be application/grpc or application/grpc+proto";
        return Err(Refused::Http(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Failure::plain(Code::Unimplemented, text),
        ));
    }
    let path = head.path.split_once('?').map_or(head.path.as_str(), |(path, _)| path);
    if SIDE.iter().any(|service| path.starts_with(service)) {
        return Ok(Target::Side);
    }
    let method = path.strip_prefix('/').and_then(|path| path.split_once('/'));
    let callee = match method {
        Some((generation_a::SERVICE, method)) => generation_a::reader(method).map(Callee::Coordination),
        Some((generation_c::SERVICE, method)) => generation_c::reader(method).map(Callee::Coordination),
        Some((reports::SERVICE, reports::METHOD)) => Some(Callee::Reports),
        _ => None,
    };
    if let Some(callee) = callee {
        return encoding(&head.fields).map(|()| Target::Call(callee));
    }
    let shown = path.get(..path.floor_char_boundary(200)).unwrap_or_default();
    Err(Refused::Call(Failure::plain(Code::Unimplemented, format!("this server has no method {shown}"))))
}

fn is_grpc(headers: &HeaderMap) -> bool {
    let Some(given) = headers.get(CONTENT_TYPE) else { return false };
    let Some(after) = given.as_bytes().strip_prefix(b"application/grpc") else { return false };
    matches!(after.strip_prefix(b"+proto").unwrap_or(after), [] | [b';', ..])
}

fn encoding(headers: &HeaderMap) -> Result<(), Refused> {
    match headers.get("grpc-encoding").map(|given| given.as_bytes()) {
        None | Some(b"identity" | b"gzip") => Ok(()),
        Some(other) => {
            let shown = String::from_utf8_lossy(other.get(..other.len().min(50)).unwrap_or_default());
            let text = format!("this server knows no message compression {shown:?}, only identity and gzip");
            Err(Refused::Encoding(Failure::plain(Code::Unimplemented, text)))
        }
    }
}

fn compresses(headers: &HeaderMap) -> bool {
    headers.get("grpc-encoding").is_some_and(|given| given.as_bytes() == b"gzip")
}

fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let (unit, number) = headers.get("grpc-timeout")?.as_bytes().split_last()?;
    // Eight digits at most, says the protocol: the largest unit holds no overflow then.
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

    fn head(method: &str, path: &str, headers: &[(&'static str, &str)]) -> Head {
        let named = |(name, value): &(&'static str, &str)| {
            (http::HeaderName::from_static(name), value.parse().expect("a value"))
        };
        let mut head = Head::default();
        (head.method, head.path) = (method.into(), path.into());
        head.fields = headers.iter().map(named).collect();
        head
    }

    const TYPE: (&str, &str) = ("content-type", "application/grpc");

    #[test]
    fn both_generations_and_the_others() {
        let path = |path| target(&head("POST", path, &[TYPE]));
        assert!(matches!(
            path("/tensorflow.CoordinationService/Heartbeat"),
            Ok(Target::Call(Callee::Coordination(_)))
        ));
        assert!(matches!(
            path("/xla.coordination.CoordinationService/WatchTasks"),
            Ok(Target::Call(Callee::Coordination(_)))
        ));
        assert!(matches!(path("/grpc.health.v1.Health/Check"), Ok(Target::Side)));
        for unknown in [
            "/",
            "/x",
            "/tensorflow.CoordinationService/",
            "/tensorflow.CoordinationService/WatchTasks",
            "/xla.coordination.CoordinationService/ResetTask",
            "/xla.coordination.CoordinationService/Heartbeat/x",
            "/xla.CoordinationService/Heartbeat",
        ] {
            let Err(Refused::Call(why)) = path(unknown) else { panic!("{unknown}") };
            assert_eq!(why.code, Code::Unimplemented);
        }
    }

    #[test]
    fn what_is_no_grpc_is_refused_as_http() {
        let path = "/xla.coordination.CoordinationService/Heartbeat";
        let status = |method, headers: &[_]| match target(&head(method, path, headers)) {
            Err(Refused::Http(status, _)) => status.as_u16(),
            Err(Refused::Encoding(_)) => 1,
            Err(Refused::Call(_)) => 2,
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
        let given = |text| timeout(&head("POST", "/", &[("grpc-timeout", text)]).fields);
        assert_eq!(given("50S"), Some(Duration::from_secs(50)));
        assert_eq!(given("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(given("7m"), Some(Duration::from_millis(7)));
        assert_eq!(given("12u"), Some(Duration::from_micros(12)));
        for bad in ["", "S", "1", "123456789S", "-1S", "1x", "1 S"] {
            assert_eq!(given(bad), None, "{bad:?}");
        }
    }
}
