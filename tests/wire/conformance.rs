//! Tests of what RFC 9113 and RFC 7541 require of a server. The cases are those of h2spec, named by the sections of
//! RFC 7540. Each case sends bytes over its own connection and states the exact answer.

use crate::frames::*;
use crate::second_client::SecondClient;
use crate::support::{MusterServer, Signal};

/// A reaction of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServerReaction {
    /// GOAWAY with this code.
    GoAway(u32),
    /// RST_STREAM with this code.
    Reset(u32, u32),
    /// A response with this HTTP status on a stream.
    Answer(u32, u16),
    /// PING with ACK and this first byte.
    Pong(u8),
    /// The end of the connection without GOAWAY.
    Close,
}
use ServerReaction::{Answer, Close, GoAway, Pong, Reset};

struct ConformanceCase {
    section: &'static str,
    says: &'static str,
    sends: Vec<u8>,
    expected: Vec<ServerReaction>,
}

/// The payload of the ping that ends every case; its acknowledgement shows that the connection is open.
const LAST: [u8; 8] = *b"\xfflast...";

fn case(
    section: &'static str,
    says: &'static str,
    sends: &[&[u8]],
    expected: &[ServerReaction],
) -> ConformanceCase {
    let sends = [&connection_opening()[..], &sends.concat()].concat();
    ConformanceCase { section, says, sends, expected: expected.to_vec() }
}

/// Returns a case without the regular opening.
fn raw(
    section: &'static str,
    says: &'static str,
    sends: &[&[u8]],
    expected: &[ServerReaction],
) -> ConformanceCase {
    ConformanceCase { section, says, sends: sends.concat(), expected: expected.to_vec() }
}

/// Returns a request that waits, so that its stream stays half-closed.
fn waiting_get_request(stream: u32) -> Vec<u8> {
    complete_request_with_fields(stream, &request_fields_of_method("GetKeyValue"))
}

fn data_frame(flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    http2_frame(DATA, flags, stream, payload)
}

fn continuation_frame(flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    http2_frame(CONTINUATION, flags, stream, payload)
}

fn priority_frame(stream: u32, on: u32) -> Vec<u8> {
    http2_frame(PRIORITY, 0, stream, &[&on.to_be_bytes()[..], &[16]].concat())
}

/// Returns HEADERS with this header block.
fn headers_frame_of_block(stream: u32, flags: u8, bytes: &[u8]) -> Vec<u8> {
    http2_frame(HEADERS, END_HEADERS | END_STREAM | flags, stream, bytes)
}

/// Returns a frame header without its payload.
fn frame_header_announcing_length(kind: u8, stream: u32, length: u32) -> Vec<u8> {
    let mut frame = http2_frame(kind, 0, stream, &[]);
    frame[..3].copy_from_slice(&length.to_be_bytes()[1..]);
    frame
}

/// Returns a complete request with one field changed, omitted (`""`) or added.
fn request_with_changed_field(name: &'static str, value: Option<&'static str>) -> Vec<u8> {
    let mut fields = request_fields();
    let place = fields.iter().position(|(have, _)| *have == name);
    match (place, value) {
        (Some(place), Some(value)) => fields[place].1 = value,
        (Some(place), None) => drop(fields.remove(place)),
        (None, Some(value)) => fields.push((name, value)),
        (None, None) => panic!("nothing to leave out"),
    }
    complete_request_with_fields(1, &fields)
}

/// Returns a complete request with a further field before all others, or after them.
fn request_with_further_field(name: &'static str, value: &'static str, first: bool) -> Vec<u8> {
    let mut fields = request_fields();
    fields.insert(if first { 0 } else { fields.len() }, (name, value));
    complete_request_with_fields(1, &fields)
}

/// Returns a request with trailers.
fn request_with_trailers(flags: u8, fields: &[(&str, &str)]) -> Vec<u8> {
    [headers_frame(1, 0, &request_fields()), data_frame(0, 1, &GET_K), headers_frame(1, flags, fields)]
        .concat()
}

const P: u32 = PROTOCOL_ERROR;
const F: u32 = FRAME_SIZE_ERROR;
const C: u32 = COMPRESSION_ERROR;
/// A missing key is a response like any other.
const ANSWERED: ServerReaction = Answer(1, 200);

fn framing_cases() -> Vec<ConformanceCase> {
    let plain = header_block(&request_fields());
    let headers = |flags, bytes: &[u8]| http2_frame(HEADERS, flags, 1, bytes);
    vec![
        raw("3.5", "Something else than the preface.", &[b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], &[Close]),
        raw("3.5", "A preface with a wrong end.", &[b"PRI * HTTP/2.0\r\n\r\nSM\r\nXX"], &[Close]),
        raw(
            "3.5",
            "A preface that settings do not follow.",
            &[PREFACE, &http2_frame(PING, 0, 0, &[0; 8])],
            &[GoAway(P)],
        ),
        raw(
            "3.5",
            "A preface that an acknowledgement follows.",
            &[PREFACE, &http2_frame(SETTINGS, ACK, 0, &[])],
            &[GoAway(P)],
        ),
        case("3.5", "A preface and settings.", &[], &[]),
        case("4.1", "A frame of an unknown type.", &[&http2_frame(0x16, 0, 0, &[0; 8])], &[]),
        case("4.1", "A ping with undefined flags.", &[&http2_frame(PING, 0x16, 0, &[7; 8])], &[Pong(7)]),
        case("4.1", "A ping with the reserved bit.", &[&http2_frame(PING, 0, 1 << 31, &[7; 8])], &[Pong(7)]),
        case(
            "4.2",
            "Data of 16,384 bytes.",
            &[
                &headers_frame(1, 0, &request_fields_of_method("InsertKeyValue")),
                &data_frame(END_STREAM, 1, &insert_message(b'j', &[7; 16_370])),
            ],
            &[ANSWERED],
        ),
        case(
            "4.2",
            "Data larger than any frame may be.",
            &[
                &headers_frame(1, 0, &request_fields()),
                &frame_header_announcing_length(DATA, 1, (2 << 20) + 1),
            ],
            &[GoAway(F)],
        ),
        case(
            "4.2",
            "Headers larger than any frame may be.",
            &[&frame_header_announcing_length(HEADERS, 1, (2 << 20) + 1)],
            &[GoAway(F)],
        ),
        case(
            "4.2",
            "Headers larger than headers may be.",
            &[&frame_header_announcing_length(HEADERS, 1, 1 << 20)],
            &[GoAway(ENHANCE_YOUR_CALM)],
        ),
        case(
            "4.3",
            "A header block that cannot be decoded.",
            &[&headers_frame_of_block(1, 0, &[0xff, 0xff, 0xff, 0xff, 0xff])],
            &[GoAway(C)],
        ),
        case(
            "4.3",
            "A priority within a header block.",
            &[&headers(0, &plain), &priority_frame(3, 0)],
            &[GoAway(P)],
        ),
        case(
            "4.3",
            "Headers of another stream within a header block.",
            &[&headers(0, &plain), &complete_request(3)],
            &[GoAway(P)],
        ),
        case(
            "5.4.1",
            "A broken ping ends the connection.",
            &[&http2_frame(PING, 0, 0, &[0; 6])],
            &[GoAway(F)],
        ),
        case(
            "5.5",
            "An unknown extension frame.",
            &[&http2_frame(0x42, 0xff, 5, b"extension"), &complete_request(1)],
            &[ANSWERED],
        ),
        case(
            "5.5",
            "An unknown extension frame within a header block.",
            &[&headers(0, &plain), &http2_frame(0x42, 0, 1, &[0; 8])],
            &[GoAway(P)],
        ),
    ]
}

fn stream_cases() -> Vec<ConformanceCase> {
    let plain = header_block(&request_fields());
    let closed = |frame: &[u8], does: ServerReaction| {
        let given_up = case(
            "5.1",
            "A frame on a stream that the peer has reset.",
            &[&waiting_get_request(1), &reset_frame(1), frame],
            &[does],
        );
        let both = case(
            "5.1",
            "A frame on a stream that both have ended.",
            &[&complete_request(1), frame],
            &[ANSWERED, does],
        );
        [given_up, both]
    };
    let mut cases = vec![
        case("5.1", "Idle: data.", &[&data_frame(0, 1, b"x")], &[GoAway(P)]),
        case("5.1", "Idle: a reset.", &[&reset_frame(1)], &[GoAway(P)]),
        case("5.1", "Idle: a window update.", &[&window_update_frame(1, 100)], &[GoAway(P)]),
        case("5.1", "Idle: a continuation.", &[&continuation_frame(END_HEADERS, 1, &plain)], &[GoAway(P)]),
        case("5.1", "Idle: a priority.", &[&priority_frame(1, 3)], &[]),
        case(
            "5.1",
            "Half-closed: data.",
            &[&waiting_get_request(1), &data_frame(END_STREAM, 1, b"x")],
            &[Reset(1, STREAM_CLOSED)],
        ),
        case(
            "5.1",
            "Half-closed: headers.",
            &[&waiting_get_request(1), &headers_frame(1, END_STREAM, &request_fields())],
            &[Reset(1, STREAM_CLOSED)],
        ),
        case(
            "5.1",
            "Half-closed: a continuation.",
            &[&waiting_get_request(1), &continuation_frame(END_HEADERS, 1, &plain)],
            &[GoAway(P)],
        ),
        case(
            "5.1",
            "Half-closed: window update, priority, reset.",
            &[&waiting_get_request(1), &window_update_frame(1, 5), &priority_frame(1, 3), &reset_frame(1)],
            &[],
        ),
        case(
            "5.1",
            "Closed: window update, priority, reset.",
            &[&complete_request(1), &window_update_frame(1, 5), &priority_frame(1, 3), &reset_frame(1)],
            &[ANSWERED],
        ),
        case(
            "5.1",
            "Closed by the server: data that was on its way.",
            &[
                &headers_frame(1, 0, &[(":method", "POST")]),
                &data_frame(END_STREAM, 1, b"x"),
                &complete_request(3),
            ],
            &[Reset(1, P), Answer(3, 200)],
        ),
        case("5.1.1", "An even number.", &[&complete_request(2)], &[GoAway(P)]),
        case(
            "5.1.1",
            "An even number below one that was used.",
            &[&complete_request(5), &complete_request(2)],
            &[Answer(5, 200), GoAway(P)],
        ),
        case(
            "5.1.1",
            "A number lower than one that was used.",
            &[&complete_request(5), &complete_request(3)],
            &[Answer(5, 200), GoAway(P)],
        ),
        case(
            "5.1.1",
            "Numbers that leave some out.",
            &[&complete_request(5), &complete_request(13)],
            &[Answer(5, 200), Answer(13, 200)],
        ),
        case(
            "5.3.1",
            "Headers of a stream that depends on itself.",
            &[&headers_frame_of_block(1, WITH_PRIORITY, &[&[0, 0, 0, 1, 16][..], &plain].concat())],
            &[Reset(1, P)],
        ),
        case(
            "5.3.1",
            "A priority that makes an idle stream depend on itself.",
            &[&priority_frame(1, 1)],
            &[GoAway(P)],
        ),
        case(
            "5.3.1",
            "A priority that makes an open stream depend on itself.",
            &[&waiting_get_request(1), &priority_frame(1, 1)],
            &[Reset(1, P)],
        ),
    ];
    cases.extend(closed(&data_frame(END_STREAM, 1, b"x"), Reset(1, STREAM_CLOSED)));
    cases.extend(closed(&headers_frame(1, END_STREAM, &request_fields()), GoAway(STREAM_CLOSED)));
    cases.extend(closed(&continuation_frame(END_HEADERS, 1, &plain), GoAway(P)));
    cases
}

fn request_frame_cases() -> Vec<ConformanceCase> {
    let plain = header_block(&request_fields());
    let padded = |padding: u8, payload: &[u8]| [&[padding][..], payload, &vec![0; padding.into()]].concat();
    let open = headers_frame(1, 0, &request_fields());
    let (first, rest) = plain.split_at(plain.len() / 2);
    vec![
        case("6.1", "Data on the connection.", &[&data_frame(0, 0, b"x")], &[GoAway(P)]),
        case(
            "6.1",
            "Data with padding.",
            &[&open, &data_frame(END_STREAM | PADDED, 1, &padded(9, &GET_K))],
            &[ANSWERED],
        ),
        case(
            "6.1",
            "Data with more padding than there is frame.",
            &[&open, &data_frame(END_STREAM | PADDED, 1, &[6, 0, 0, 0, 0])],
            &[GoAway(P)],
        ),
        case(
            "6.1",
            "Data without room for the length of its padding.",
            &[&open, &data_frame(END_STREAM | PADDED, 1, &[])],
            &[GoAway(F)],
        ),
        case(
            "6.2",
            "Headers on the connection.",
            &[&http2_frame(HEADERS, END_HEADERS, 0, &plain)],
            &[GoAway(P)],
        ),
        case(
            "6.2",
            "Headers with padding and priority.",
            &[
                &http2_frame(
                    HEADERS,
                    END_HEADERS | PADDED | WITH_PRIORITY,
                    1,
                    &padded(4, &[&[0, 0, 0, 0, 9][..], &plain].concat()),
                ),
                &data_frame(END_STREAM, 1, &GET_K),
            ],
            &[ANSWERED],
        ),
        case(
            "6.2",
            "Headers with more padding than there is frame.",
            &[&http2_frame(HEADERS, END_HEADERS | PADDED, 1, &[200, 0x83])],
            &[GoAway(P)],
        ),
        case(
            "6.2",
            "Headers without room for their priority.",
            &[&http2_frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, &[0; 4])],
            &[GoAway(F)],
        ),
        case(
            "6.3",
            "A priority on the connection.",
            &[&http2_frame(PRIORITY, 0, 0, &[0, 0, 0, 1, 1])],
            &[GoAway(P)],
        ),
        case("6.3", "A priority of four bytes.", &[&http2_frame(PRIORITY, 0, 1, &[0; 4])], &[GoAway(F)]),
        case("6.4", "A reset on the connection.", &[&reset_frame(0)], &[GoAway(P)]),
        case(
            "6.4",
            "A reset of an even stream.",
            &[&complete_request(5), &reset_frame(2)],
            &[Answer(5, 200), GoAway(P)],
        ),
        case(
            "6.4",
            "A reset of three bytes.",
            &[&waiting_get_request(1), &http2_frame(RST_STREAM, 0, 1, &[0; 3])],
            &[GoAway(F)],
        ),
        case(
            "6.10",
            "A head in pieces.",
            &[
                &http2_frame(HEADERS, END_STREAM, 1, first),
                &continuation_frame(0, 1, &[]),
                &continuation_frame(END_HEADERS, 1, rest),
            ],
            &[ANSWERED],
        ),
        case(
            "6.10",
            "Something else after a piece.",
            &[&http2_frame(HEADERS, 0, 1, first), &data_frame(0, 1, b"x")],
            &[GoAway(P)],
        ),
        case(
            "6.10",
            "A continuation on the connection.",
            &[&http2_frame(HEADERS, 0, 1, first), &continuation_frame(END_HEADERS, 0, rest)],
            &[GoAway(P)],
        ),
        case(
            "6.10",
            "A continuation of another stream.",
            &[&http2_frame(HEADERS, 0, 1, first), &continuation_frame(END_HEADERS, 3, rest)],
            &[GoAway(P)],
        ),
        case(
            "6.10",
            "A continuation of a head that has ended.",
            &[&open, &continuation_frame(END_HEADERS, 1, rest)],
            &[GoAway(P)],
        ),
        case(
            "6.10",
            "A continuation of a continuation that has ended.",
            &[
                &http2_frame(HEADERS, 0, 1, first),
                &continuation_frame(END_HEADERS, 1, rest),
                &continuation_frame(END_HEADERS, 1, rest),
            ],
            &[GoAway(P)],
        ),
        case(
            "6.10",
            "A continuation after data.",
            &[&open, &data_frame(0, 1, b"x"), &continuation_frame(END_HEADERS, 1, rest)],
            &[GoAway(P)],
        ),
        case(
            "6.10",
            "More pieces than make sense.",
            &[&http2_frame(HEADERS, 0, 1, first), &continuation_frame(0, 1, &[]).repeat(64)],
            &[GoAway(ENHANCE_YOUR_CALM)],
        ),
    ]
}

fn connection_frame_cases() -> Vec<ConformanceCase> {
    let largest = (1_u32 << 31) - 1;
    vec![
        case(
            "6.5",
            "An acknowledgement with contents.",
            &[&http2_frame(SETTINGS, ACK, 0, &[0; 6])],
            &[GoAway(F)],
        ),
        case("6.5", "Settings on a stream.", &[&http2_frame(SETTINGS, 0, 1, &[])], &[GoAway(P)]),
        case("6.5", "Settings of three bytes.", &[&http2_frame(SETTINGS, 0, 0, &[0; 3])], &[GoAway(F)]),
        case("6.5.2", "ENABLE_PUSH 0 and 1.", &[&settings_frame(&[(ENABLE_PUSH, 0), (ENABLE_PUSH, 1)])], &[]),
        case("6.5.2", "ENABLE_PUSH 2.", &[&settings_frame(&[(ENABLE_PUSH, 2)])], &[GoAway(P)]),
        case(
            "6.5.2",
            "INITIAL_WINDOW_SIZE beyond all.",
            &[&settings_frame(&[(INITIAL_WINDOW_SIZE, 1 << 31)])],
            &[GoAway(FLOW_CONTROL_ERROR)],
        ),
        case(
            "6.5.2",
            "INITIAL_WINDOW_SIZE beyond all, and taken back.",
            &[&settings_frame(&[(INITIAL_WINDOW_SIZE, 1 << 31), (INITIAL_WINDOW_SIZE, 1)])],
            &[GoAway(FLOW_CONTROL_ERROR)],
        ),
        case(
            "6.5.2",
            "MAX_FRAME_SIZE below all.",
            &[&settings_frame(&[(MAX_FRAME_SIZE, (1 << 14) - 1)])],
            &[GoAway(P)],
        ),
        case(
            "6.5.2",
            "MAX_FRAME_SIZE beyond all.",
            &[&settings_frame(&[(MAX_FRAME_SIZE, 1 << 24)])],
            &[GoAway(P)],
        ),
        case("6.5.2", "A setting that nobody knows.", &[&settings_frame(&[(0xff, 1)])], &[]),
        case("6.7", "A ping.", &[&http2_frame(PING, 0, 0, &[5; 8])], &[Pong(5)]),
        case(
            "6.7",
            "An acknowledgement of a ping that nobody sent.",
            &[&http2_frame(PING, ACK, 0, &[5; 8])],
            &[],
        ),
        case("6.7", "A ping on a stream.", &[&http2_frame(PING, 0, 1, &[5; 8])], &[GoAway(P)]),
        case("6.7", "A ping of nine bytes.", &[&http2_frame(PING, 0, 0, &[5; 9])], &[GoAway(F)]),
        case("6.8", "A goodbye on a stream.", &[&http2_frame(GOAWAY, 0, 1, &[0; 8])], &[GoAway(P)]),
        case("6.8", "A goodbye of seven bytes.", &[&http2_frame(GOAWAY, 0, 0, &[0; 7])], &[GoAway(F)]),
        case(
            "6.8",
            "A goodbye while a call is in progress.",
            &[&waiting_get_request(1), &http2_frame(GOAWAY, 0, 0, &[0; 20]), &complete_request(3)],
            &[Answer(3, 200)],
        ),
        case("6.9", "A window update by nothing.", &[&window_update_frame(0, 0)], &[GoAway(P)]),
        case(
            "6.9",
            "A stream's window update by nothing.",
            &[&waiting_get_request(1), &window_update_frame(1, 0)],
            &[Reset(1, P)],
        ),
        case(
            "6.9",
            "A window update of three bytes.",
            &[&http2_frame(WINDOW_UPDATE, 0, 0, &[0; 3])],
            &[GoAway(F)],
        ),
        case(
            "6.9.1",
            "Window updates beyond all.",
            &[&window_update_frame(0, largest), &window_update_frame(0, largest)],
            &[GoAway(FLOW_CONTROL_ERROR)],
        ),
        case(
            "6.9.1",
            "A stream's window updates beyond all.",
            &[&waiting_get_request(1), &window_update_frame(1, largest), &window_update_frame(1, largest)],
            &[Reset(1, FLOW_CONTROL_ERROR)],
        ),
        case(
            "6.9.2",
            "Settings that make a stream's window overflow.",
            &[
                &waiting_get_request(1),
                &window_update_frame(1, largest - 65_535),
                &settings_frame(&[(INITIAL_WINDOW_SIZE, 65_536)]),
            ],
            &[GoAway(FLOW_CONTROL_ERROR)],
        ),
        case(
            "7",
            "A goodbye with an unknown code.",
            &[&waiting_get_request(1), &http2_frame(GOAWAY, 0, 0, &[0, 0, 0, 0, 0, 0, 0, 0xff])],
            &[],
        ),
        case(
            "7",
            "A reset with an unknown code.",
            &[&waiting_get_request(1), &http2_frame(RST_STREAM, 0, 1, &[0, 0, 0, 0xff])],
            &[],
        ),
        case(
            "8.2",
            "A client that pushes.",
            &[&http2_frame(
                PUSH_PROMISE,
                END_HEADERS,
                1,
                &[&3_u32.to_be_bytes()[..], &header_block(&request_fields())].concat(),
            )],
            &[GoAway(P)],
        ),
    ]
}

fn request_head_cases() -> Vec<ConformanceCase> {
    let malformed = |section, says, sends: Vec<u8>| case(section, says, &[&sends], &[Reset(1, P)]);
    let one_byte = |stream| data_frame(END_STREAM, stream, b"x");
    let connect =
        [headers_frame(1, END_STREAM, &[(":method", "CONNECT"), (":authority", "a:1")]), complete_request(3)]
            .concat();
    let long: &'static str = Box::leak("y".repeat(20_000).into_boxed_str());
    vec![
        case(
            "8.1",
            "A request with trailers.",
            &[&request_with_trailers(END_STREAM, &[("x-checksum", "1")])],
            &[ANSWERED],
        ),
        malformed(
            "8.1",
            "Second headers that do not end the stream.",
            request_with_trailers(0, &[("x-checksum", "1")]),
        ),
        malformed(
            "8.1.2",
            "A field's name in upper case.",
            request_with_further_field("X-Upper", "x", false),
        ),
        malformed("8.1.2.1", "An unknown pseudo-header.", request_with_further_field(":test", "x", true)),
        malformed(
            "8.1.2.1",
            "The pseudo-header of answers.",
            request_with_further_field(":status", "200", true),
        ),
        malformed(
            "8.1.2.1",
            "A pseudo-header in trailers.",
            request_with_trailers(END_STREAM, &[(":method", "POST")]),
        ),
        malformed(
            "8.1.2.1",
            "A pseudo-header behind a field.",
            request_with_further_field(":authority", "x", false),
        ),
        malformed(
            "8.1.2.2",
            "A field of the connection.",
            request_with_further_field("connection", "keep-alive", false),
        ),
        malformed(
            "8.1.2.2",
            "`te` that is not `trailers`.",
            request_with_changed_field("te", Some("trailers, deflate")),
        ),
        malformed("8.1.2.2", "`te: gzip`.", request_with_changed_field("te", Some("gzip"))),
        malformed("8.1.2.3", "An empty :path.", request_with_changed_field(":path", Some(""))),
        malformed("8.1.2.3", "No :method.", request_with_changed_field(":method", None)),
        malformed("8.1.2.3", "No :scheme.", request_with_changed_field(":scheme", None)),
        malformed("8.1.2.3", "No :path.", request_with_changed_field(":path", None)),
        malformed("8.1.2.3", "Two :method.", request_with_further_field(":method", "POST", true)),
        malformed("8.1.2.3", "Two :scheme.", request_with_further_field(":scheme", "http", true)),
        malformed("8.1.2.3", "Two :path.", request_with_further_field(":path", "/", true)),
        malformed("8.1.2.3", "Two :authority.", request_with_further_field(":authority", "x", true)),
        case("8.1.2.3", "CONNECT without a path.", &[&connect], &[Answer(1, 405), Answer(3, 200)]),
        malformed(
            "8.1.2.6",
            "A content-length beyond the data.",
            request_with_further_field("content-length", "9", false),
        ),
        malformed(
            "8.1.2.6",
            "A content-length below the data.",
            request_with_further_field("content-length", "7", false),
        ),
        malformed(
            "8.1.2.6",
            "A content-length below the data in pieces.",
            [
                headers_frame(1, 0, &[&request_fields()[..], &[("content-length", "1")]].concat()),
                data_frame(0, 1, b"x"),
                one_byte(1),
            ]
            .concat(),
        ),
        malformed(
            "8.1.2.6",
            "A content-length without data.",
            headers_frame(1, END_STREAM, &[&request_fields()[..], &[("content-length", "1")]].concat()),
        ),
        malformed(
            "8.1.2.6",
            "A content-length that trailers cut short.",
            [
                headers_frame(1, 0, &[&request_fields()[..], &[("content-length", "9")]].concat()),
                data_frame(0, 1, &GET_K),
                headers_frame(1, END_STREAM, &[("x", "y")]),
            ]
            .concat(),
        ),
        malformed(
            "8.1.2.6",
            "Two content-lengths.",
            [headers_frame(
                1,
                0,
                &[&request_fields()[..], &[("content-length", "8"), ("content-length", "9")]].concat(),
            )]
            .concat(),
        ),
        case(
            "8.1.2.6",
            "A content-length that is right.",
            &[&request_with_further_field("content-length", "8", false)],
            &[ANSWERED],
        ),
        malformed(
            "8.2.1",
            "A value that begins with a space.",
            request_with_further_field("x-padded", " x", false),
        ),
        malformed(
            "8.2.1",
            "A value that ends with a tab.",
            request_with_further_field("x-padded", "x\t", false),
        ),
        malformed(
            "8.2.1",
            "A value with a line's end.",
            request_with_further_field("x-lines", "a\r\nb", false),
        ),
        malformed("8.2.1", "A name with a space.", request_with_further_field("x name", "x", false)),
        malformed(
            "8.3.1",
            "A host that is not the authority.",
            request_with_further_field("host", "other.test:1", false),
        ),
        case(
            "8.3.1",
            "A host that is the authority.",
            &[&request_with_further_field("host", "target.test:1", false)],
            &[ANSWERED],
        ),
        case(
            "10.5.1",
            "A header list that is too long.",
            &[&request_with_further_field("x-long", long, false)],
            &[Answer(1, 431), Reset(1, NO_ERROR)],
        ),
    ]
}

fn compression_cases() -> Vec<ConformanceCase> {
    let request = [&[0x83, 0x86][..], &header_block(&request_fields()[2..])].concat();
    let open = http2_frame(HEADERS, END_HEADERS, 1, &request);
    let ended = data_frame(END_STREAM, 1, &GET_K);
    let ack = http2_frame(SETTINGS, ACK, 0, &[]);
    let none = [&[0x20][..], &request].concat();
    let garbled = |section, says, bytes: &[u8]| {
        case(section, says, &[&headers_frame_of_block(1, 0, bytes)], &[GoAway(C)])
    };
    vec![
        case("HPACK 2.3.2", "References to the static table.", &[&open, &ended], &[ANSWERED]),
        garbled("HPACK 2.3.3", "A reference beyond both tables.", &[0xc6]),
        garbled("HPACK 2.3.3", "A name's reference beyond both tables.", &[0x7f, 0x07, 1, b'x']),
        garbled(
            "HPACK 4.2",
            "A change of the table's size behind a field.",
            &[&request[..], &[0x20]].concat(),
        ),
        garbled("HPACK 5.1", "A number without end.", &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]),
        garbled(
            "HPACK 5.2",
            "Padding of more than seven bits.",
            b"\x00\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff",
        ),
        garbled("HPACK 5.2", "Padding of zeros.", b"\x00\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x90"),
        garbled("HPACK 5.2", "The end of the string, spelled out.", b"\x00\x84\xff\xff\xff\xff\x01x"),
        garbled("HPACK 5.2", "A string that is cut short.", b"\x00\x05abc"),
        garbled("HPACK 6.1", "Index 0.", &[0x80]),
        garbled("HPACK 6.3", "A table larger than allowed.", &[0x3f, 0xe2, 0x1f]),
        case(
            "HPACK 4.2",
            "A table of nothing, before and after it is agreed.",
            &[
                &http2_frame(HEADERS, END_HEADERS, 1, &none),
                &ended,
                &ack,
                &http2_frame(HEADERS, END_HEADERS, 3, &request),
                &data_frame(END_STREAM, 3, &GET_K),
            ],
            &[ANSWERED, Answer(3, 200)],
        ),
        case(
            "HPACK 4.2",
            "A field after it was agreed that there is no table, which was not said.",
            &[&ack, &open],
            &[GoAway(C)],
        ),
        case(
            "HPACK 4.2",
            "It is said then.",
            &[&ack, &http2_frame(HEADERS, END_HEADERS, 1, &none), &ended],
            &[ANSWERED],
        ),
        case(
            "HPACK 4.2",
            "A table after it was agreed that there is none.",
            &[&ack, &http2_frame(HEADERS, END_HEADERS, 1, &[&[0x3f, 0x01][..], &request].concat())],
            &[GoAway(C)],
        ),
    ]
}

fn generic_cases() -> Vec<ConformanceCase> {
    let with_priority = [&[0x80, 0, 0, 0, 200][..], &header_block(&request_fields())].concat();
    vec![
        case("generic 1", "A connection begins.", &[], &[]),
        case(
            "generic 2",
            "A call on each of two streams.",
            &[&complete_request(1), &complete_request(3)],
            &[ANSWERED, Answer(3, 200)],
        ),
        case(
            "generic 3.1",
            "Data in pieces.",
            &[
                &headers_frame(1, 0, &request_fields()),
                &data_frame(0, 1, &GET_K[..3]),
                &data_frame(0, 1, &[]),
                &data_frame(END_STREAM, 1, &GET_K[3..]),
            ],
            &[ANSWERED],
        ),
        case(
            "generic 3.2",
            "Headers with a priority.",
            &[
                &http2_frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, &with_priority),
                &data_frame(END_STREAM, 1, &GET_K),
            ],
            &[ANSWERED],
        ),
        case(
            "generic 3.3",
            "Priorities, exclusive ones too.",
            &[&priority_frame(1, 0), &priority_frame(3, 1 | 1 << 31), &complete_request(1)],
            &[ANSWERED],
        ),
        case(
            "generic 3.4",
            "A reset.",
            &[&waiting_get_request(1), &reset_frame(1), &complete_request(3)],
            &[Answer(3, 200)],
        ),
        case(
            "generic 3.8",
            "A goodbye after which nothing is in progress.",
            &[&http2_frame(GOAWAY, 0, 0, &[0; 8])],
            &[Close],
        ),
        case(
            "generic 3.9",
            "Window updates.",
            &[&waiting_get_request(1), &window_update_frame(0, 1), &window_update_frame(1, 1)],
            &[],
        ),
        case(
            "generic 4",
            "A GET.",
            &[&headers_frame(
                1,
                END_STREAM,
                &[(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "x")],
            )],
            &[Answer(1, 405)],
        ),
        case(
            "generic 4",
            "A HEAD and an OPTIONS.",
            &[
                &headers_frame(1, END_STREAM, &[(":method", "HEAD"), (":scheme", "http"), (":path", "/")]),
                &headers_frame(3, END_STREAM, &[(":method", "OPTIONS"), (":scheme", "http"), (":path", "*")]),
            ],
            &[Answer(1, 405), Answer(3, 405)],
        ),
    ]
}

/// Returns the reactions of the server to these bytes.
async fn observe_reactions(server: &MusterServer, sends: &[u8], beyond: bool) -> Vec<ServerReaction> {
    let mut peer = FramePeer::connect(server.grpc).await;
    peer.say(sends).await;
    if beyond {
        peer.say(&http2_frame(PING, 0, 0, &LAST)).await;
    }
    let mut does = Vec::new();
    loop {
        let Some(frame) = peer.receive_frame().await else {
            if !matches!(does.last(), Some(GoAway(_))) {
                does.push(Close);
            }
            return does;
        };
        match frame.kind {
            GOAWAY => does.push(GoAway(frame.u32_at(4))),
            RST_STREAM => does.push(Reset(frame.stream, frame.u32_at(0))),
            HEADERS if frame.payload[0] == 0x88 => does.push(Answer(frame.stream, 200)),
            // A literal with the name `:status`.
            HEADERS if frame.payload[..2] == [8, 3] => {
                let status = std::str::from_utf8(&frame.payload[2..5]).expect("digits");
                does.push(Answer(frame.stream, status.parse().expect("digits")));
            }
            PING if frame.payload == LAST => return does,
            PING => does.push(Pong(frame.payload[0])),
            _ => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_case_of_the_standards_is_answered_as_they_say() {
    let server = MusterServer::patient(&["--job", "witness=2", "--job", "target=3", "--log", "error"]);
    let witness = SecondClient::register(&server, "witness").await;
    let cases = [
        framing_cases(),
        stream_cases(),
        request_frame_cases(),
        connection_frame_cases(),
        request_head_cases(),
        compression_cases(),
        generic_cases(),
    ];
    let (mut count, mut wrong) = (0, Vec::new());
    for ConformanceCase { section, says, sends, expected } in cases.into_iter().flatten() {
        // If the connection must end without GOAWAY, no ping may come before.
        let does = observe_reactions(&server, &sends, expected.last() != Some(&Close)).await;
        count += 1;
        if does != expected {
            wrong.push(format!("{section} {says} {expected:?} is expected, and it does {does:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {count} cases:\n{}", wrong.len(), wrong.join("\n"));
    assert!(count > 140, "{count} cases");
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_beyond_the_bound_are_refused() {
    // 5.1.2
    let server = MusterServer::patient(&["--job", "target=3", "--log", "error", "--grpc-streams", "10"]);
    let opened: Vec<u8> = (0..12).flat_map(|n| waiting_get_request(2 * n + 1)).collect();
    let does = observe_reactions(&server, &[connection_opening(), opened].concat(), true).await;
    assert_eq!(does, [Reset(21, REFUSED_STREAM), Reset(23, REFUSED_STREAM)]);
}

/// Returns an insert of this value under a key of one letter.
fn insert_message(key: u8, value: &[u8]) -> Vec<u8> {
    let mut entry = vec![0x0A, 1, key, 0x12];
    prost::encoding::encode_varint(value.len() as u64, &mut entry);
    entry.extend(value);
    let mut message = vec![0x0A];
    prost::encoding::encode_varint(entry.len() as u64, &mut message);
    message.extend(entry);
    crate::raw::grpc_framed(&message)
}

#[tokio::test(flavor = "multi_thread")]
async fn windows_are_kept_to_byte_by_byte() {
    // 6.9.1, 6.9.2
    let server = MusterServer::patient(&["--job", "target=3", "--log", "error"]);
    let mut peer = FramePeer::connect(server.grpc).await;
    let insert = [
        headers_frame(1, 0, &request_fields_of_method("InsertKeyValue")),
        data_frame(END_STREAM, 1, &insert_message(b'k', b"0123456789")),
    ];
    peer.say(
        &[PREFACE, &settings_frame(&[(INITIAL_WINDOW_SIZE, 1)]), &insert.concat(), &waiting_get_request(3)]
            .concat(),
    )
    .await;
    let mut sizes = Vec::new();
    let mut hear = async |peer: &mut FramePeer, count: usize| {
        while sizes.len() < count {
            let frame = peer.receive_frame().await.expect("the connection stays");
            if frame.kind == DATA && frame.stream == 3 {
                sizes.push(frame.payload.len());
            }
        }
        // No further data comes before the window is opened.
        peer.say(&http2_frame(PING, 0, 0, &LAST)).await;
        let next = peer.receive_until(|frame| frame.kind == DATA || frame.payload == LAST).await;
        assert_eq!(next.expect("it answers").kind, PING, "{sizes:?}");
        sizes.clone()
    };
    assert_eq!(hear(&mut peer, 1).await, [1]);
    peer.say(&window_update_frame(3, 2)).await;
    assert_eq!(hear(&mut peer, 2).await, [1, 2]);
    // The window becomes negative, and must become positive again before data comes.
    peer.say(&settings_frame(&[(INITIAL_WINDOW_SIZE, 0)])).await;
    assert_eq!(hear(&mut peer, 2).await, [1, 2]);
    peer.say(&window_update_frame(3, 1)).await;
    assert_eq!(hear(&mut peer, 2).await, [1, 2]);
    peer.say(&settings_frame(&[(INITIAL_WINDOW_SIZE, 3)])).await;
    assert_eq!(hear(&mut peer, 3).await, [1, 2, 3]);
    peer.say(&settings_frame(&[(INITIAL_WINDOW_SIZE, 1), (INITIAL_WINDOW_SIZE, 1000)])).await;
    let end = peer
        .receive_until(|frame| frame.kind == HEADERS && frame.stream == 3 && frame.has_flag(END_STREAM))
        .await;
    assert!(end.is_some(), "the rest comes, and the end");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_opened_after_the_last_goodbye_is_refused_and_others_end_in_peace() {
    let server = MusterServer::patient(&["--job", "target=3", "--log", "error"]);
    let mut peer = FramePeer::open(server.grpc).await;
    // Its body is incomplete, so it is in progress when the server stops.
    peer.say(&[headers_frame(1, 0, &request_fields()), data_frame(0, 1, &GET_K[..4])].concat()).await;
    peer.say(&http2_frame(PING, 0, 0, &LAST)).await;
    assert!(peer.receive_until(|frame| frame.payload == LAST).await.is_some());
    server.signal(Signal::TERM);
    let ping = peer.receive_until(|frame| frame.kind == PING).await.expect("it says that it stops");
    let late = [headers_frame(3, 0, &request_fields()), data_frame(END_STREAM, 3, &GET_K)].concat();
    peer.say(
        &[http2_frame(PING, ACK, 0, &ping.payload), late, data_frame(END_STREAM, 1, &GET_K[4..])].concat(),
    )
    .await;
    let mut seen = Vec::new();
    while let Some(frame) = peer.receive_frame().await {
        match frame.kind {
            GOAWAY => seen.push((frame.u32_at(0), frame.u32_at(4))),
            RST_STREAM => seen.push((frame.stream, frame.u32_at(0))),
            HEADERS => seen.push((frame.stream, u32::from(frame.flags))),
            _ => {}
        }
    }
    assert_eq!(
        seen,
        [(1, NO_ERROR), (3, REFUSED_STREAM), (1, u32::from(END_HEADERS | END_STREAM))],
        "the last goodbye, the refusal, and the answer to what was in progress"
    );
}
