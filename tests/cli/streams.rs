//! Tests of the HTTP streams of events.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use crate::harness::{MusterServer, Process, Signal, muster, wait_until};

/// A subscriber of an event stream.
struct EventSubscriber(BufReader<TcpStream>);

impl EventSubscriber {
    fn open(server: &MusterServer, headers: &str) -> Self {
        let mut stream = TcpStream::connect(server.http).expect("it connects");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout can be set");
        let path = "/api/v1/jobs/default/events";
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n{headers}\r\n"
        )
        .expect("sent");
        Self(BufReader::new(stream))
    }

    /// Returns the next line with this beginning; `None` at the end.
    fn read_line_starting_with(&mut self, start: &str) -> Option<String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.0.read_line(&mut line).expect("it can be read") == 0 {
                return None;
            }
            if let Some(rest) = line.trim_end().strip_prefix(start) {
                return Some(rest.to_owned());
            }
        }
    }
}

fn exclude_task(server: &MusterServer, task: u32) {
    let body = format!(r#"{{"task": {task}, "reason": "r"}}"#);
    assert_eq!(server.send("POST", "/api/v1/jobs/default/exclusions", &body).status, 201);
}

#[test]
fn a_stream_delivers_events_at_once_and_resumes_after_a_break() {
    let server = MusterServer::start(&["--tasks", "3", "--job", "other=1", "--recoverable"]);
    let mut stream = EventSubscriber::open(&server, "");
    assert!(stream.read_line_starting_with("HTTP/1.1 ").is_some_and(|status| status.starts_with("200")));
    assert_eq!(stream.read_line_starting_with("event: ").as_deref(), Some("job-declared"));
    assert_eq!(stream.read_line_starting_with("event: ").as_deref(), Some("run-opened"));
    exclude_task(&server, 2);
    let id = stream.read_line_starting_with("id: ").expect("an event");
    assert_eq!(stream.read_line_starting_with("event: ").as_deref(), Some("excluded"));
    let data: serde_json::Value =
        serde_json::from_str(&stream.read_line_starting_with("data: ").expect("its data")).expect("JSON");
    assert_eq!((&data["kind"], data["number"].to_string()), (&"excluded".into(), id.clone()));
    drop(stream);
    exclude_task(&server, 1);
    let mut stream = EventSubscriber::open(&server, &format!("last-event-id: {id}\r\n"));
    let next = stream.read_line_starting_with("data: ").expect("an event");
    assert!(next.contains("\"target\":{\"task\":1}"), "{next}");
}

#[test]
fn streams_are_bounded_and_end_with_the_server() {
    let server = MusterServer::start(&["--tasks", "1", "--http-streams", "5"]);
    let mut open: Vec<EventSubscriber> = (0..5).map(|_| EventSubscriber::open(&server, "")).collect();
    for stream in &mut open {
        assert!(stream.read_line_starting_with("HTTP/1.1 ").is_some_and(|status| status.starts_with("200")));
    }
    let mut refused = EventSubscriber::open(&server, "connection: close\r\n");
    assert!(refused.read_line_starting_with("HTTP/1.1 ").is_some_and(|status| status.starts_with("503")));
    open.pop();
    wait_until("there is room again", || {
        let mut stream = EventSubscriber::open(&server, "connection: close\r\n");
        stream.read_line_starting_with("HTTP/1.1 ").is_some_and(|status| status.starts_with("200"))
    });
    server.signal(Signal::TERM);
    for stream in &mut open {
        while stream.read_line_starting_with("data: ").is_some() {}
    }
    assert_eq!(server.end().code, Some(0));
}

#[test]
fn the_command_line_follows() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable"]);
    let mut following = Process::start(&mut muster(["events", "--follow", "--server", &server.url()]));
    following.out_line("run-opened");
    exclude_task(&server, 1);
    following.out_line("  excluded  ");
    let mut watching = Process::start(&mut muster(["status", "--watch=50ms", "--server", &server.url()]));
    watching.out_line("EXCLUDED  task 1");
    server.send("DELETE", "/api/v1/jobs/default/exclusions/1?reason=r", "");
    watching.out_line("JOB default");
}

#[test]
fn events_follow_resumes_when_the_server_returns() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable"]);
    let address = server.http.to_string();
    let mut following = Process::start(&mut muster(["events", "--follow", "--server", &server.url()]));
    exclude_task(&server, 1);
    following.out_line("  excluded  ");
    server.signal(Signal::TERM);
    assert_eq!(server.end().code, Some(0));
    following.err_line("trying again");
    let again = ["serve", "--tasks", "2", "--recoverable", "--grpc", "127.0.0.1:0", "--http", &address];
    let server = MusterServer::run(&mut muster(again));
    // The server is another one with events of its own, none of which the client has seen.
    following.out_line("no longer kept");
    following.out_line("  job-declared  ");
    exclude_task(&server, 0);
    following.out_line("task 0 is excluded");
    // The deletion of the job ends the stream.
    let gone = r#"/api/v1/jobs/default?reason=r&force=true"#;
    assert_eq!(server.send("DELETE", gone, "").status, 204);
    following.out_line("  job-deleted  ");
    server.signal(Signal::TERM);
    assert_eq!(server.end().code, Some(0));
    let mut running = Process::start(&mut muster([
        "serve",
        "--job",
        "other=1",
        "--grpc",
        "127.0.0.1:0",
        "--http",
        &server.http.to_string(),
    ]));
    running.out_line("HTTP  ");
    let ended = following.end();
    assert!(ended.code == Some(1) && ended.err.contains("no job \"default\""), "{ended:?}");
}
