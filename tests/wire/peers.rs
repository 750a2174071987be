//! Tests with independent clients, each of which does real work: gRPC's own clients for Python and for Go, nghttp
//! and h2load, curl, and node.
//!
//! `tests/run` installs these clients.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::frames::GET_K;
use crate::second_client::SecondClient;
use crate::support::MusterServer;
use crate::support::harness::run_with_input;

async fn start_server_and_second_client() -> (MusterServer, SecondClient) {
    let server = MusterServer::patient(&["--job", "witness=2", "--job", "target=3", "--log", "error"]);
    let witness = SecondClient::register(&server, "witness").await;
    (server, witness)
}

/// Runs a program to its end.
fn run_program(program: impl AsRef<std::ffi::OsStr>, arguments: &[&str], input: &str) -> Output {
    let program = program.as_ref();
    run_with_input(Command::new(program).args(arguments), input)
        .unwrap_or_else(|error| panic!("{program:?} cannot be started ({error}); tests/run installs it"))
}

fn output_text(output: &Output) -> String {
    [&output.stdout[..], &output.stderr].iter().map(|some| String::from_utf8_lossy(some)).collect()
}

/// Writes the message of a call to a file.
fn message_file(name: &str, message: &[u8]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, message).expect("a writable directory");
    path
}

const TRY_GET: &str = "/tensorflow.CoordinationService/TryGetKeyValue";

#[tokio::test(flavor = "multi_thread")]
async fn grpc_for_python_checks_health_and_calls_and_waits() {
    let (server, witness) = start_server_and_second_client().await;
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/grpcio/bin/python");
    let script = r#"
import sys, threading, grpc
address = sys.argv[1]
plain = lambda message: message
with grpc.insecure_channel(address, options=[("grpc.default_authority", "target.test:1")]) as channel:
    call = lambda path: channel.unary_unary(path, request_serializer=plain, response_deserializer=plain)
    health = call("/grpc.health.v1.Health/Check")
    assert health(b"", timeout=30) == b"\x08\x01", "it serves"
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch", request_serializer=plain, response_deserializer=plain)
    first = watch(b"", timeout=30)
    assert next(first) == b"\x08\x01"
    first.cancel()
    service = "/tensorflow.CoordinationService/"
    insert, get, probe = (call(service + name) for name in ("InsertKeyValue", "GetKeyValue", "TryGetKeyValue"))
    def text(data):
        length, encoded = len(data), b""
        while length > 127:
            encoded, length = encoded + bytes([length & 127 | 128]), length >> 7
        return encoded + bytes([length]) + data
    # A call that waits, and its answer.
    waiting = get.future(b"\x0a\x03key", timeout=60)
    value = bytes(range(256)) * 4096
    entry = b"\x0a" + text(b"key") + b"\x12" + text(value)
    insert(b"\x0a" + text(entry), timeout=60)
    assert waiting.result().endswith(value)
    for compression in (grpc.Compression.Gzip, grpc.Compression.NoCompression):
        for _ in range(300):
            assert get(b"\x0a\x03key", timeout=30, compression=compression).endswith(value[-100:])
    for _ in range(2000):
        try:
            probe(b"\x0a\x04none", timeout=30)
            raise SystemExit("nobody has it")
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.NOT_FOUND, error
    late = get.future(b"\x0a\x05never", timeout=0.2)
    assert late.exception().code() == grpc.StatusCode.DEADLINE_EXCEEDED
    given_up = [get.future(b"\x0a\x05never") for _ in range(500)]
    for one in given_up:
        one.cancel()
    # More metadata than is taken is refused, and the channel goes on.
    try:
        probe(b"\x0a\x04none", timeout=30, metadata=[("x-long", "y" * 20000)])
        raise SystemExit("it was taken")
    except grpc.RpcError as error:
        assert error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN), error
    assert get(b"\x0a\x03key", timeout=30).endswith(value)
print("done")
"#;
    let output = run_program(&python, &["-", &server.grpc.to_string()], script);
    assert!(output.status.success() && output_text(&output).contains("done"), "{}", output_text(&output));
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nghttp_calls_and_reads_the_trailers() {
    let (server, witness) = start_server_and_second_client().await;
    let message = message_file("nghttp-message", &GET_K);
    let url = format!("http://{}{TRY_GET}", server.grpc);
    let data = format!("--data={}", message.display());
    let arguments = [
        "--verbose",
        "--null-out",
        "--header=:method: POST",
        "--header=:authority: target.test:1",
        "--header=content-type: application/grpc",
        "--header=te: trailers",
        // It prefers large tables and priorities.
        "--header-table-size=65536",
        "--encoder-header-table-size=65536",
        "--multiply=20",
        &data,
        &url,
    ];
    let said = output_text(&run_program("nghttp", &arguments, ""));
    assert_eq!(said.matches(":status: 200").count(), 20, "{said}");
    assert_eq!(said.matches("grpc-status: 5").count(), 20, "{said}");
    assert!(!said.contains("GOAWAY frame <length=8, flags=0x00, stream_id=0>\n          (last_stream_id=0, error_code=PROTOCOL") && !said.contains("RST_STREAM"), "{said}");
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn h2load_makes_thousands_of_calls() {
    let (server, witness) = start_server_and_second_client().await;
    let message = message_file("h2load-message", &GET_K);
    let url = format!("http://{}{TRY_GET}", server.grpc);
    let data = format!("--data={}", message.display());
    let arguments = [
        "--requests=20000",
        "--clients=10",
        "--max-concurrent-streams=100",
        "--header=:authority: target.test:1",
        "--header=content-type: application/grpc",
        "--header=te: trailers",
        &data,
        &url,
    ];
    let said = output_text(&run_program("h2load", &arguments, ""));
    assert!(said.contains("20000 succeeded, 0 failed, 0 errored, 0 timeout"), "{said}");
    assert!(said.contains("status codes: 20000 2xx"), "{said}");
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn curl_checks_health_with_prior_knowledge() {
    let (server, witness) = start_server_and_second_client().await;
    // An empty message asks for the health of the whole server.
    let message = message_file("curl-message", &[0; 5]);
    let headers = Path::new(env!("CARGO_TARGET_TMPDIR")).join("curl-headers");
    let url = format!("http://{}/grpc.health.v1.Health/Check", server.grpc);
    let (data, headers_path) = (format!("@{}", message.display()), headers.display().to_string());
    let arguments = [
        "--silent",
        "--show-error",
        "--http2-prior-knowledge",
        "--dump-header",
        &headers_path,
        "--header",
        "content-type: application/grpc",
        "--header",
        "te: trailers",
        "--data-binary",
        &data,
        &url,
    ];
    let output = run_program("curl", &arguments, "");
    assert!(output.status.success(), "{}", output_text(&output));
    assert_eq!(output.stdout, [0, 0, 0, 0, 2, 8, 1], "it serves");
    let headers = std::fs::read_to_string(headers).expect("curl has written it");
    assert!(headers.starts_with("HTTP/2 200") && headers.contains("grpc-status: 0"), "{headers}");
    // A request that is no call is refused by HTTP status.
    let plain = run_program(
        "curl",
        &["--silent", "--http2-prior-knowledge", "--write-out", "%{http_code}", &url],
        "",
    );
    assert_eq!(String::from_utf8_lossy(&plain.stdout), "405");
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_calls_resets_pings_and_goes() {
    let (server, witness) = start_server_and_second_client().await;
    let script = r#"
const http2 = require('node:http2');
const assert = require('node:assert');
const session = http2.connect('http://' + process.argv[2]);
const call = (path, message) => new Promise((resolve, reject) => {
  const stream = session.request({ ':method': 'POST', ':path': path, ':authority': 'target.test:1',
    'content-type': 'application/grpc', te: 'trailers' });
  const seen = { body: [] };
  stream.on('response', (headers) => { seen.http = headers[':status']; seen.grpc = headers['grpc-status']; });
  stream.on('trailers', (trailers) => { seen.grpc = trailers['grpc-status']; });
  stream.on('data', (data) => seen.body.push(data));
  stream.on('error', reject);
  stream.on('end', () => resolve(seen));
  stream.end(Buffer.from(message));
});
const service = '/tensorflow.CoordinationService/';
const ask = [0, 0, 0, 0, 3, 10, 1, 107];
(async () => {
  const health = await call('/grpc.health.v1.Health/Check', [0, 0, 0, 0, 0]);
  assert.deepEqual([health.http, health.grpc, [...Buffer.concat(health.body)]], [200, '0', [0, 0, 0, 0, 2, 8, 1]]);
  const many = await Promise.all(Array.from({ length: 2000 }, () => call(service + 'TryGetKeyValue', ask)));
  assert(many.every((one) => one.http === 200 && one.grpc === '5'));
  for (let n = 0; n < 500; n++) {
    const stream = session.request({ ':method': 'POST', ':path': service + 'GetKeyValue', 'content-type': 'application/grpc' });
    stream.on('error', () => {});
    stream.end(Buffer.from(ask));
    stream.close(http2.constants.NGHTTP2_CANCEL);
  }
  await new Promise((resolve, reject) => session.ping((error) => error ? reject(error) : resolve()));
  session.settings({ initialWindowSize: 1000 });
  const last = await call(service + 'TryGetKeyValue', ask);
  assert.equal(last.grpc, '5');
  session.close(() => console.log('done'));
})().catch((error) => { console.error(error); process.exit(1); });
"#;
    let path = message_file("peer.cjs", script.as_bytes());
    let output = run_program("node", &[&path.display().to_string(), &server.grpc.to_string()], "");
    assert!(output.status.success() && output_text(&output).contains("done"), "{}", output_text(&output));
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_for_go_checks_health_and_watches_it() {
    let (server, witness) = start_server_and_second_client().await;
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("grpc-go-peer");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/wire/peer.go");
    // Debian's packages of Go libraries install source trees here.
    let built = Command::new("go")
        .args(["build", "-o"])
        .args([&program, &source])
        .env("GO111MODULE", "off")
        .env("GOPATH", "/usr/share/gocode")
        .output()
        .unwrap_or_else(|error| panic!("go cannot be started ({error}); tests/run installs it"));
    assert!(built.status.success(), "tests/run installs grpc-go: {}", output_text(&built));
    let output = run_program(&program, &[&server.grpc.to_string()], "");
    assert!(output.status.success(), "{}", output_text(&output));
    assert_eq!(
        output_text(&output).lines().filter(|line| line.starts_with("ok: ")).count(),
        5,
        "{}",
        output_text(&output)
    );
    witness.assert_served().await;
}
