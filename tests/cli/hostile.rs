//! Tests that control characters in foreign text are escaped by every subcommand, in the log and on every page.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use muster::proto::xla;
use muster::text::is_hidden_character;
use prost::Message as _;

use crate::clients::Clients;
use crate::harness::{CommandOutput, MusterServer, Process, Signal, muster, run, wait_until};

/// Clears the screen, sets the window title, changes the direction of writing, and begins lines of its own.
const HOSTILE: &str = "x\u{1b}[2J\u{1b}]0;owned\u{7}\r\nJOB forged\nmuster: forged\n2026-01-01T00:00:00.000000Z  WARN \
                       forged\n[0] forged\u{9b}31m\u{7f}\u{8}\u{202e}\u{2066}\u{200f}\u{61c}\u{200b}\u{feff}\u{2028}\u{e0041}<b>";
/// The escaped form of a control character, which every place must show.
const SPELLED: &str = "\\u{1b}[2J";
/// The same without colons, slashes and line breaks, as part of a key.
const HOSTILE_NAME: &str = "cpu\u{1b}[2J\u{9b}1m\u{202e}\u{200b}";

/// Checks text for a terminal: it has no hidden characters but line ends, and no line begins with foreign
/// text.
#[track_caller]
fn check_terminal_text(what: &str, text: &str) {
    if let Some(found) = text.chars().find(|c| *c != '\n' && is_hidden_character(*c)) {
        panic!("{what} shows {found:?}: {text:?}");
    }
    for line in text.lines() {
        let forged = ["JOB forged", "muster: forged", "2026-01-01T00:00:00.000000Z", "[0] forged"];
        assert!(
            !forged.iter().any(|start| line.trim_start().starts_with(start)),
            "{what}: {line:?} in {text}"
        );
    }
}

/// Checks a page in the same way. Its values may contain line breaks and tabs.
#[track_caller]
fn check_page_text(what: &str, text: &str) {
    let shown = |c: char| !matches!(c, '\n' | '\t') && is_hidden_character(c);
    if let Some(found) = text.chars().find(|c| shown(*c)) {
        let at = text.find(found).unwrap_or_default();
        let begin = text.floor_char_boundary(at.saturating_sub(120));
        panic!("{what} has {found:?} after {:?}", &text[begin..at]);
    }
    // The text in the HTML is escaped once.
    assert!(
        !text.contains("&#60;div") && !text.contains("forged<b>"),
        "{what} is escaped as a whole, or not at all"
    );
}

/// Starts a server whose job is full of hostile text.
fn hostile_server() -> (MusterServer, Clients) {
    let server = MusterServer::start(&["--tasks", "4", "--recoverable", "--log", "debug"]);
    let clients = Clients::connect_to(&server);
    clients.register(4);
    clients.insert(HOSTILE, HOSTILE);
    clients.insert(&format!("{HOSTILE}/{HOSTILE}"), HOSTILE);
    let topology = xla::LocalTopologyProto {
        process_id: 0,
        boot_id: HOSTILE.into(),
        devices: vec![xla::DeviceProto { device_kind: HOSTILE.into(), ..Default::default() }],
        ..Default::default()
    };
    let key = format!("{HOSTILE_NAME}:local_topology/{HOSTILE_NAME}/0");
    clients.insert(&key, topology.encode_to_vec());
    clients.wait_for_key(&format!("wanted/{HOSTILE}"));
    clients.wait_at_barrier(0, &format!("first/{HOSTILE}"), 1);
    wait_until("a barrier has failed", || {
        server.get("/api/v1/jobs/default/events?kind=barrier-failed").body.contains("\"number\"")
    });
    clients.wait_at_barrier(0, HOSTILE, 600_000);
    clients.fail(2, HOSTILE);
    // The audit has the requests with this path and this key, refused or done.
    let encoded = percent_encoding::utf8_percent_encode(HOSTILE, percent_encoding::NON_ALPHANUMERIC);
    for path in [format!("/api/v1/jobs/default/keys/{encoded}"), format!("/api/v1/jobs/{encoded}")] {
        for (method, body) in [("PUT", r#"{"text": "v", "reason": "r"}"#), ("DELETE", "")] {
            server.send(method, &path, body);
        }
    }
    server.get(&format!("/jobs/{encoded}"));
    wait_until("all of it has arrived", || {
        let job = server.get("/api/v1/jobs/default").body;
        job.contains("wanted/")
            && job.contains("INTERNAL") | job.contains("forged")
            && job.contains("waits_at\":[\"x")
    });
    (server, clients)
}

/// Returns the checked output of a subcommand.
fn run_and_check_output(server: &MusterServer, arguments: &[&str]) -> CommandOutput {
    let ended = run(muster(arguments).args(["--server", &server.url()]));
    check_terminal_text(&format!("{arguments:?}: stdout"), &ended.out);
    check_terminal_text(&format!("{arguments:?}: stderr"), &ended.err);
    ended
}

#[test]
fn no_subcommand_gives_a_terminal_what_a_client_wrote() {
    let (server, clients) = hostile_server();
    let mut following = Process::start(&mut muster(["events", "--follow", "--server", &server.url()]));
    for arguments in [
        &["status"][..],
        &["events"],
        &["events", "--kind", "barrier-failed"],
        &["audit"],
        &["audit", "--refused"],
    ] {
        let ended = run_and_check_output(&server, arguments);
        assert!(ended.code == Some(0) && ended.out.contains(SPELLED), "{arguments:?}: {ended:?}");
    }
    // A reason may contain invisible characters and is shown with their codes.
    let reason = "bad\u{200b}NIC\u{ad}";
    for arguments in [
        &["exclude", "1", "--dry-run", "--reason", reason][..],
        &["exclude", "1", "--reason", reason],
        &["exclude"],
        &["status"],
        &["readmit", "--task", "1", "--reason", reason],
        &["drain", "--reason", reason],
        &["job", "create", "other", "--tasks", "2", "--reason", reason],
        &["job", "list"],
        &["job", "show", "default"],
        &["job", "set", "other", "--tasks", "3", "--reason", reason],
        &["job", "delete", "other", "--reason", reason],
        &["audit"],
    ] {
        let ended = run_and_check_output(&server, arguments);
        assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
    }
    assert!(run_and_check_output(&server, &["audit"]).out.contains("bad\\u{200b}NIC\\u{ad}"));
    // JSON has the exact text.
    let seen: serde_json::Value = {
        let ended = run_and_check_output(&server, &["status", "--json"]);
        serde_json::from_str(&ended.out).expect("it is JSON")
    };
    let waits = &seen["jobs"][0]["run"]["tasks"][0]["waits_at"];
    assert!(waits.as_array().is_some_and(|ids| ids.iter().any(|id| id == HOSTILE)), "{waits}");
    for arguments in [&["events", "--json"][..], &["audit", "--json"], &["exclude", "--json"]] {
        run_and_check_output(&server, arguments);
    }
    clients.wait_at_barrier(0, &format!("later/{HOSTILE}"), 1);
    let line = following.out_line("later/");
    check_terminal_text("events --follow", &line);
    assert!(line.contains(SPELLED), "{line}");
    server.signal(Signal::TERM);
    let ended = server.end();
    check_terminal_text("the log", &ended.err);
    let stamped = |line: &str| line.len() > 40 && line.as_bytes()[10] == b'T' && line.contains("Z ");
    assert!(ended.err.lines().count() > 20 && ended.err.lines().all(stamped), "{}", ended.err);
    assert!(ended.err.contains(SPELLED), "{}", ended.err);
    check_terminal_text("events --follow", &following.err_line("trying again"));
}

#[test]
fn a_log_for_machines_says_what_a_client_wrote_and_shows_none_of_it() {
    let server = MusterServer::start_json(&["--tasks", "1"]);
    let clients = Clients::connect_to(&server);
    clients.register(1);
    clients.fail(0, HOSTILE);
    wait_until("it has failed", || server.get("/api/v1/jobs").body.contains("\"failed\""));
    server.signal(Signal::TERM);
    let ended = server.end();
    check_terminal_text("the log", &ended.err);
    let lines = ended.err.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
    assert!(lines.filter(|line| line.to_string().contains("forged")).count() > 0, "{}", ended.err);
}

#[test]
fn no_page_and_no_fragment_shows_what_a_client_hid() {
    let (server, _clients) = hostile_server();
    assert_eq!(
        server
            .send(
                "POST",
                "/api/v1/jobs/default/exclusions",
                "{\"task\": 3, \"reason\": \"a\u{200b}b\u{ad}\"}"
            )
            .status,
        201
    );
    let encoded = percent_encoding::utf8_percent_encode(HOSTILE, percent_encoding::NON_ALPHANUMERIC);
    let job = "/jobs/default";
    let mut pages: Vec<String> = ["/", "/audit", "/transfers", "/api", "/login"].map(str::to_owned).to_vec();
    for page in [
        "",
        "/barriers",
        "/timeline",
        "/timeline?task=2",
        "/tasks/0",
        "/tasks/2",
        "/devices",
        "/transfers",
        "/keys",
        "/drain",
        "/exclusions",
    ] {
        pages.push(format!("{job}{page}"));
    }
    pages.push(format!("{job}/keys?prefix={encoded}"));
    pages.push(format!("{job}/keys/value?key={encoded}"));
    pages.push(format!("{job}?find={encoded}"));
    pages.push(format!("{job}/tasks/{encoded}"));
    pages.push(format!("/jobs/{encoded}"));
    let mut spelled = 0;
    for page in &pages {
        let answer = server.get_with(page, "accept: text/html");
        check_page_text(page, &answer.body);
        spelled += usize::from(answer.body.contains("\\u{1b}"));
    }
    assert!(spelled >= 9, "only {spelled} pages show an escape: the hostile text is not on them");
    for which in
        ["job", "barriers", "timeline", "devices", "keys", "exclusions", "drain", "task&task=0", "transfers"]
    {
        check_page_text(which, &first_live_parts(&server, &format!("{job}/live?page={which}")));
    }
    for which in ["overview", "audit"] {
        check_page_text(which, &first_live_parts(&server, &format!("/live?page={which}")));
    }
}

/// Returns the first parts of the live stream of a page.
fn first_live_parts(server: &MusterServer, path: &str) -> String {
    let mut stream = TcpStream::connect(server.http).expect("it connects");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout can be set");
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n")
        .expect("sent");
    let lines = BufReader::new(stream).lines().map(|line| line.expect("it can be read"));
    let data = lines.filter_map(|line| line.strip_prefix("data: ").map(str::to_owned)).next().expect("parts");
    check_terminal_text(path, &data);
    let said: serde_json::Value = serde_json::from_str(&data).expect("JSON");
    let parts = said["parts"].as_array().expect("a list");
    assert!(!parts.is_empty(), "{path}: {said}");
    parts.iter().filter_map(|part| part[2].as_str()).collect::<Vec<_>>().join("\n")
}

/// A server that is no Muster and answers with hostile text.
struct HostileServer {
    url: String,
}

impl HostileServer {
    /// Answers `GET /api/v1/server` with `about`, and all other requests with `rest`.
    fn start(about: String, rest: (u16, String)) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let mut head = [0; 4096];
                let read = stream.read(&mut head).unwrap_or(0);
                let asks = String::from_utf8_lossy(&head[..read]).into_owned();
                let (status, body) =
                    if asks.starts_with("GET /api/v1/server ") { (200, &about) } else { (rest.0, &rest.1) };
                let _ = write!(
                    stream,
                    "HTTP/1.1 {status} Fine\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: \
                     close\r\n\r\n{body}",
                    body.len()
                );
            }
        });
        Self { url }
    }
}

#[test]
fn an_invalid_response_is_shown_escaped() {
    let honest = MusterServer::start(&["--tasks", "1"]);
    let about = honest.get("/api/v1/server").body;
    let hostile = serde_json::to_string(HOSTILE).expect("JSON");
    let named = format!(r#"{{"name": {hostile}, "version": "1", "commit": ""}}"#);
    let old = format!(r#"{{"name": "muster", "version": {hostile}}}"#);
    let problem = format!(
        r#"{{"type": "/problems/x", "title": {hostile}, "status": 403, "detail": {hostile}, "instance": {hostile}}}"#
    );
    let unknown = format!(r#"{{"jobs": [{{"name": "a", "tasks": 1, "state": {hostile}}}], {hostile}: 1}}"#);
    let mut shown = 0;
    for (about, rest) in [
        (HOSTILE.to_owned(), (200, String::new())),
        (named, (200, String::new())),
        (old, (200, String::new())),
        (about.clone(), (403, problem)),
        (about.clone(), (403, HOSTILE.to_owned())),
        (about.clone(), (200, unknown)),
        (about, (200, HOSTILE.to_owned())),
    ] {
        let liar = HostileServer::start(about, rest);
        for arguments in [&["status"][..], &["job", "list"], &["audit"], &["events", "--job", "a"]] {
            let ended = run(muster(arguments).args(["--server", &liar.url]));
            assert_eq!(ended.code, Some(1), "{arguments:?}: {ended:?}");
            check_terminal_text(&format!("{arguments:?}"), &ended.err);
            check_terminal_text(&format!("{arguments:?}"), &ended.out);
            shown += usize::from(ended.err.contains(SPELLED));
        }
    }
    assert!(shown >= 8, "only {shown} errors say anything of what the server said");
}

#[test]
fn a_launch_and_a_worker_show_foreign_text_escaped() {
    // The first cause of the last run, which another process reported.
    let server = MusterServer::start(&["--tasks", "2"]);
    let clients = Clients::connect_to(&server);
    clients.register(2);
    clients.fail(1, HOSTILE);
    wait_until("it has failed", || server.get("/api/v1/jobs").body.contains("\"failed\""));
    let mut launch = muster(["launch", "-n", "2", "--server", &server.url(), "--", "sh", "-c", "exit 3"]);
    let ended = run(&mut launch);
    assert!(ended.code == Some(3) && ended.err.contains("first cause"), "{ended:?}");
    check_terminal_text("launch", &ended.err);
    assert!(ended.err.contains(SPELLED), "{ended:?}");

    // A notice that any client may write.
    let server = MusterServer::start(&["--tasks", "1", "--recoverable"]);
    let clients = Clients::connect_to(&server);
    let service = server.grpc.to_string();
    let mut worker =
        Process::start(&mut muster(["worker", "--service", &service, "--task", "0", "--log", "debug"]));
    let line = worker.out_line("Registered");
    let run = line.rsplit(' ').next().and_then(|run| u64::from_str_radix(run, 16).ok());
    clients.set_service_incarnation(run.expect("it says its run"));
    clients.insert("RECEIVED_PREEMPTION_NOTICE", HOSTILE);
    let line = worker.out_line("preemption notice");
    check_terminal_text("worker", &line);
    assert!(line.contains(SPELLED), "{line}");
    // Another thread writes the log, later than the program its line.
    let logged = worker.err_line("a preemption notice");
    assert!(logged.contains(SPELLED), "{logged}");
    worker.signal(Signal::KILL);
    let ended = worker.end();
    check_terminal_text("worker", &ended.out);
    check_terminal_text("worker", &ended.err);
}
