//! Tests of a server under stress: hostile clients, disks and readers that hang, limits, clocks and signals. During
//! each test, the server must answer the heartbeats of a well-behaved task, and health probes.

use std::fs::OpenOptions;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use muster::http::{NewToken, append_token_to_file};
use muster::service::AccessRole;

use crate::harness::{PATIENCE, Process, Signal, TempFolder, http, muster, run, wait_until};
use crate::service::{
    HeartbeatClient, connect, read_response_status, start_service, start_service_after_shell_command,
};

const READY: &str = "/healthz/ready";

/// Waits until the server closes a connection.
fn wait_for_close(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    matches!(stream.read_to_end(&mut Vec::new()), Ok(_) | Err(_)) && stream.read(&mut [0]).unwrap_or(0) == 0
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_comes_byte_by_byte_takes_no_more_memory_than_its_bytes() {
    const LENGTH: usize = 20_000;
    let service = start_service(&[]);
    let heart = HeartbeatClient::start(&service).await;
    let before = service.peak_resident_bytes();
    let dribble = |path: &'static str, kind: &'static str| {
        let http = service.http;
        std::thread::spawn(move || {
            let mut stream = connect(http);
            write!(
                stream,
                "POST {path} HTTP/1.1\r\nhost: {http}\r\ncontent-type: {kind}\r\ncontent-length: {LENGTH}\r\n\r\n"
            )
            .unwrap();
            for _ in 0..LENGTH {
                // The server answers before the end of the body and closes the connection.
                if stream.write_all(b"x").is_err() {
                    break;
                }
                // A pause, so that each byte is a packet and is read alone.
                std::thread::sleep(Duration::from_micros(30));
            }
            stream
        })
    };
    let json = (0..4).map(|_| dribble("/api/v1/jobs", "application/json"));
    let login = (0..2).map(|_| dribble("/login", "application/x-www-form-urlencoded"));
    let all: Vec<_> = json.chain(login).collect();
    heart.expect_further_heartbeats().await;
    assert!(service.get_response_text(READY).contains("ready"));
    let mut streams: Vec<TcpStream> = all.into_iter().map(|one| one.join().unwrap()).collect();
    // The whole body arrived and is no JSON, or this machine was too busy for it to arrive in time.
    assert!(matches!(read_response_status(&mut streams[0]), 400 | 408));
    let grown = service.peak_resident_bytes() - before;
    assert!(grown < 32 << 20, "{grown} bytes more for {} of bodies", 6 * LENGTH);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_without_a_request_take_nothing_from_anybody() {
    let service = start_service(&["--http-connections", "100", "--health", "127.0.0.1:0"]);
    let heart = HeartbeatClient::start(&service).await;
    let mut hostile: Vec<TcpStream> = Vec::new();
    for number in 0..300 {
        let mut stream = connect(service.http);
        if number % 3 > 0 {
            stream.write_all(b"GET /api/v1/jobs HTTP/1.1\r\nho").unwrap();
        }
        hostile.push(stream);
        if number % 50 == 49 {
            assert!(service.get_response_text(READY).ends_with("ready\n"));
            assert!(service.get_response_text("/api/v1/jobs").starts_with("HTTP/1.1 200"));
        }
    }
    heart.expect_further_heartbeats().await;
    let page = service.get_response_text("/metrics");
    let evicted = page.lines().find(|line| line.contains("listener=\"http\",reason=\"evicted\"")).unwrap();
    assert!(!evicted.ends_with(" 0"), "{evicted}");
    // Connections with a slot lose it soon, although they send a byte now and then.
    let mut last = hostile.pop().unwrap();
    let mut dribble = last.try_clone().unwrap();
    std::thread::spawn(move || {
        while dribble.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(200));
        }
    });
    assert!(wait_for_close(&mut last));
    // While all slots are busy, health probes are answered and other requests are refused.
    let mut streams: Vec<TcpStream> = Vec::new();
    for _ in 0..100 {
        let mut stream = connect(service.http);
        write!(stream, "GET /api/v1/jobs/default/events?stream=1 HTTP/1.1\r\nhost: {}\r\n\r\n", service.http)
            .unwrap();
        stream.read_exact(&mut [0; 12]).unwrap();
        streams.push(stream);
    }
    assert!(service.get_response_text("/api/v1/jobs").contains("too-many-connections"));
    assert!(service.get_response_text(READY).ends_with("ready\n"));
    heart.expect_further_heartbeats().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_has_one_deadline_however_its_bytes_come() {
    let folder = TempFolder::new("endurance-handshake");
    let made = run(&mut muster(["tls", "new", &folder.path("certs"), "--name", "localhost"]));
    assert_eq!(made.code, Some(0), "{}", made.err);
    let [cert, key] = ["certs/server.pem", "certs/server-key.pem"].map(|name| folder.path(name));
    let service =
        start_service(&["--http-tls-cert", &cert, "--http-tls-key", &key, "--http-tls-mode", "optional"]);
    let heart = HeartbeatClient::start(&service).await;
    let mut slow: Vec<TcpStream> = (0..20).map(|_| connect(service.http)).collect();
    let mut dribbles: Vec<TcpStream> = slow.iter().map(|stream| stream.try_clone().unwrap()).collect();
    std::thread::spawn(move || {
        // The beginning of a TLS ClientHello that announces 512 bytes.
        for byte in [0x16, 3, 1, 2, 0, 1].into_iter().chain(std::iter::repeat(0)) {
            dribbles.retain_mut(|stream| stream.write_all(&[byte]).is_ok());
            if dribbles.is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    });
    heart.expect_further_heartbeats().await;
    assert!(service.get_response_text(READY).ends_with("ready\n"));
    for stream in &mut slow {
        assert!(wait_for_close(stream));
    }
    let failed = service.get_response_text("/api/v1/handshakes");
    assert!(failed.contains("did not finish the handshake"), "{failed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn health_has_a_listener_of_its_own_if_asked_for() {
    let mut command = muster(["serve", "--tasks", "1", "--grpc", "127.0.0.1:0"]);
    let command = command.args(["--http", "127.0.0.1:0", "--health", "127.0.0.1:0", "--log-format", "json"]);
    let mut running = Process::start(command);
    let line: serde_json::Value =
        serde_json::from_str(&running.err_line("serving health on a separate listener")).unwrap();
    let health: SocketAddr = line["address"].as_str().unwrap().parse().unwrap();
    running.err_line("serving");
    let text_at = |path: &str| http::get(health, path).unwrap().text();
    assert!(text_at(READY).ends_with("ready\n"));
    assert!(text_at("/healthz/live").ends_with("alive\n"));
    assert!(text_at("/api/v1/jobs").starts_with("HTTP/1.1 404"), "nothing but health");
    assert!(text_at("/metrics").starts_with("HTTP/1.1 404"));
}

/// Creates a named pipe, and keeps one end open so that it has a reader.
fn create_named_pipe(path: &str) -> std::fs::File {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unread_audit_pipe_blocks_nothing_and_losses_are_recorded() {
    let folder = TempFolder::new("endurance-fifo");
    let path = folder.path("audit");
    let mut reader = create_named_pipe(&path);
    let service = start_service(&["--audit-file", &path]);
    let heart = HeartbeatClient::start(&service).await;
    assert_eq!(service.put_keys_repeatedly(600), [204; 600]);
    heart.expect_further_heartbeats().await;
    wait_until("readiness tells of it", || {
        let ready = service.get_response_text(READY);
        ready.starts_with("HTTP/1.1 200") && ready.contains("the reader of the pipe does not read")
    });
    assert!(service.metric("muster_audit_lines_queued") > 0.0);
    wait_until("it is measured", || service.metric("muster_audit_unwritten_seconds") > 1.0);
    // A reader that starts late still reads every line, in order.
    let mut text = Vec::new();
    wait_until("every line has come", || {
        let _ = reader.read_to_end(&mut text);
        text.iter().filter(|byte| **byte == b'\n').count() >= 600
    });
    let lines = String::from_utf8(text).unwrap();
    let number = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["number"].as_u64();
    assert!(lines.lines().map(|line| number(line).unwrap()).eq(1..=600), "all of them, in order");
    wait_until("all is well again", || service.get_response_text(READY).ends_with("\r\n\r\nready\n"));
    // The pipe is full again, which does not delay the exit.
    service.put_keys_repeatedly(600);
    service.signal(Signal::TERM);
    assert_eq!(service.end().code, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_stops_changes_only_where_that_is_asked_for() {
    let service = start_service(&["--audit-file", "/dev/full"]);
    let heart = HeartbeatClient::start(&service).await;
    assert_eq!(service.put_keys_repeatedly(100), [204; 100]);
    heart.expect_further_heartbeats().await;
    wait_until("readiness tells of it", || service.get_response_text(READY).contains("No space left"));

    let service = start_service(&["--audit-file", "/dev/full", "--audit-failure", "refuse"]);
    let heart = HeartbeatClient::start(&service).await;
    // The first change is made before the failure is known.
    service.put_keys_repeatedly(1);
    wait_until("it is known", || service.get_response_text(READY).contains("No space left"));
    assert_eq!(service.put_keys_repeatedly(3), [503; 3]);
    let keys = service.get_response_text("/api/v1/jobs/default/keys");
    assert!(keys.contains("\"k0\"") && !keys.contains("\"k1\""), "{keys}");
    assert!(service.get_response_text("/api/v1/audit").contains("so changes are refused"));
    heart.expect_further_heartbeats().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unread_log_pipe_blocks_nothing() {
    let (mut log, writer) = std::io::pipe().unwrap();
    let service = start_service_after_shell_command("true", &["--log", "info"], writer.into());
    let heart = HeartbeatClient::start(&service).await;
    wait_until("lines are dropped", || {
        assert_eq!(service.put_keys_repeatedly(500), [204; 500]);
        service.metric("muster_log_lines_dropped_total") > 0.0
    });
    heart.expect_further_heartbeats().await;
    assert!(service.get_response_text(READY).ends_with("ready\n"));
    service.signal(Signal::TERM);
    assert_eq!(service.end().code, Some(0), "the end does not wait for a reader");
    drop(heart);
    let mut text = String::new();
    log.read_to_string(&mut text).unwrap();
    assert!(text.contains("muster::audit"), "what was written is whole");

    // A log on a full disk, and one whose reader is gone.
    for log in [
        Stdio::from(OpenOptions::new().write(true).open("/dev/full").unwrap()),
        Stdio::from(std::io::pipe().unwrap().1),
    ] {
        let service = start_service_after_shell_command("true", &["--log", "info"], log);
        assert_eq!(service.put_keys_repeatedly(20), [204; 20]);
        HeartbeatClient::start(&service).await.expect_further_heartbeats().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_low_limit_on_open_files_lowers_the_bounds_and_is_never_hit() {
    let folder = TempFolder::new("endurance-nofile");
    let log = folder.path("log");
    let service = start_service_after_shell_command(
        "ulimit -n 256",
        &["--health", "127.0.0.1:0"],
        std::fs::File::create(&log).unwrap().into(),
    );
    let heart = HeartbeatClient::start(&service).await;
    let hostile: Vec<TcpStream> =
        (0..400).map(|n| connect(if n % 2 == 0 { service.http } else { service.grpc })).collect();
    heart.expect_further_heartbeats().await;
    for _ in 0..10 {
        assert!(service.get_response_text(READY).ends_with("ready\n"));
    }
    assert!(service.get_response_text("/api/v1/jobs").starts_with("HTTP/1.1 200"));
    let open = std::fs::read_dir(format!("/proc/{}/fd", service.pid())).unwrap().count();
    assert!(open < 256, "{open}");
    drop(hostile);
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(log.contains("the limit on open files allows"), "{log}");
    assert!(!log.contains("cannot accept") && !log.contains("no connection can be taken"), "{log}");

    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -n 100; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_muster"), "serve"]);
    let ended = run(shell.args(["--tasks", "1", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]));
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains("the limit on open files is 100"), "{}", ended.err);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_jumps_by_a_day_changes_nothing() {
    let folder = TempFolder::new("endurance-clock");
    let offset = folder.path("offset");
    let asked = Command::new("faketime").args(["-m", "-f", "+0s", "printenv", "LD_PRELOAD"]).output();
    let library = asked.expect("faketime runs: apt-get install faketime, as tests/run does").stdout;
    let library = String::from_utf8(library).unwrap();
    std::fs::write(&offset, "+0s\n").unwrap();
    // Setting the wall clock does not change the monotonic clock.
    let fake = format!(
        "export LD_PRELOAD={} FAKETIME_TIMESTAMP_FILE={offset} FAKETIME_NO_CACHE=1 \
         FAKETIME_DONT_FAKE_MONOTONIC=1",
        library.trim()
    );
    let service = start_service_after_shell_command(&fake, &["--heartbeat-timeout", "10s"], Stdio::null());
    let heart = HeartbeatClient::start(&service).await;
    let moment = || -> u64 {
        let page = service.get_response_text("/api/v1/jobs/default");
        page.split_once("\"seen_at\":")
            .unwrap()
            .1
            .split(|c: char| !c.is_ascii_digit())
            .next()
            .unwrap()
            .parse()
            .unwrap()
    };
    let mut idle = connect(service.http);
    let first = moment();
    let mut before = first;
    for jump in ["+1d", "-1d", "+0s"] {
        std::fs::write(&offset, format!("{jump}\n")).unwrap();
        let date = |text: &str| text.lines().find(|line| line.starts_with("date:")).map(str::to_owned);
        heart.expect_further_heartbeats().await;
        assert!(service.get_response_text(READY).ends_with("ready\n"));
        assert!(date(&service.get_response_text(READY)).is_some());
        assert_eq!(service.put_keys_repeatedly(5), [204; 5], "rates go by the monotonic clock");
        let now = moment();
        assert!(now >= before, "{jump}: {before} {now}");
        before = now;
    }
    let passed = Duration::from_micros(before - first);
    assert!(passed < PATIENCE, "its clock follows no jump: {passed:?}");
    // The clock change did not time out the connection.
    write!(idle, "GET {READY} HTTP/1.1\r\nhost: {}\r\n\r\n", service.http).ok();
    let job = service.get_response_text("/api/v1/jobs/default");
    assert!(job.contains("\"connected\""), "the task was not found silent: {job}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hangup_takes_a_rotated_audit_and_new_tokens_and_ends_nothing() {
    let folder = TempFolder::new("endurance-hangup");
    let (audit, tokens) = (folder.path("audit"), folder.path("tokens.toml"));
    let token = |name: &str| {
        let made = NewToken::generate(name, AccessRole::Operator).unwrap();
        append_token_to_file(tokens.as_ref(), name, &made.line).unwrap();
        made.token
    };
    let first = token("first");
    let service = start_service(&["--audit-file", &audit, "--tokens-file", &tokens]);
    let heart = HeartbeatClient::start(&service).await;
    let ask = |token: &str, wrong: bool| {
        let mut stream = connect(service.http);
        let path = if wrong { "/api/v1/nothing" } else { "/api/v1/jobs" };
        let method = if wrong { "DELETE" } else { "GET" };
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {token}\r\n\r\n",
            service.http
        )
        .unwrap();
        read_response_status(&mut stream)
    };
    assert_eq!((ask(&first, false), ask(&first, true)), (200, 403));
    wait_until("it is in the audit", || std::fs::read_to_string(&audit).unwrap().lines().count() == 1);
    let rotated = folder.path("audit.1");
    std::fs::rename(&audit, &rotated).unwrap();
    let second = token("second");
    service.signal(Signal::HUP);
    wait_until("the file is there again", || std::fs::exists(&audit).unwrap());
    wait_until("the token is known", || ask(&second, false) == 200);
    assert_eq!(ask(&second, true), 403);
    wait_until("the new file has the line", || std::fs::read_to_string(&audit).unwrap().contains("second"));
    assert_eq!(std::fs::read_to_string(&rotated).unwrap().lines().count(), 1);
    // A token file that every user can write is not read: the former tokens stay.
    let third = token("third");
    Command::new("chmod").args(["666", &tokens]).status().unwrap();
    service.signal(Signal::HUP);
    heart.expect_further_heartbeats().await;
    assert_eq!((ask(&second, false), ask(&third, false)), (200, 401));
    drop(service);
    let ended = run(&mut muster(["serve", "--tasks", "1", "--tokens-file", &tokens, "--check-config"]));
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains("every user of this machine can write it: chmod"), "{}", ended.err);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_under_load_ends_in_its_time_with_its_code() {
    let service = start_service(&["--stop-timeout", "1s"]);
    let heart = HeartbeatClient::start(&service).await;
    let stop = Arc::new(AtomicBool::new(false));
    let http = service.http;
    let mut held: Vec<TcpStream> = Vec::new();
    for request in [
        "",
        "GET / HTTP/1.1\r\nho",
        "GET /api/v1/jobs/default/events?stream=1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "POST /api/v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{",
    ] {
        for address in [service.http, service.grpc] {
            let mut stream = connect(address);
            stream.write_all(request.as_bytes()).unwrap();
            held.push(stream);
        }
    }
    let senders: Vec<_> = (0..4)
        .map(|_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                let mut answered = 0;
                while !stop.load(Ordering::Relaxed) {
                    let Ok(mut stream) = TcpStream::connect(http) else { continue };
                    let _ = stream.set_read_timeout(Some(PATIENCE));
                    let asked = write!(stream, "GET / HTTP/1.1\r\nhost: {http}\r\nconnection: close\r\n\r\n");
                    answered +=
                        u64::from(asked.is_ok() && stream.read(&mut [0; 64]).is_ok_and(|read| read > 0));
                }
                answered
            })
        })
        .collect();
    heart.expect_further_heartbeats().await;
    service.signal(Signal::TERM);
    let code = service.end().code;
    stop.store(true, Ordering::Relaxed);
    let answered: u64 = senders.into_iter().map(|sender| sender.join().unwrap()).sum();
    assert_eq!(code, Some(0));
    assert!(answered > 0);
    drop(held);
}
