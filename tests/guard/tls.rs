//! TLS on real sockets: accepted and refused clients, and the server's messages about them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use muster::clock::Clock;
use muster::engine::Engine;
use muster::grpc::{self, GrpcLimits, ListenerJobRule};
use muster::tls::certificate_authority::{CertificateAuthority, CertificatePurpose, IssuedCertificate};
use muster::tls::{self, HandshakeFailures, HandshakeFailuresView, TlsFiles, TlsMode, TransportPolicy};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsConnector;

use crate::harness::{MusterServer, TempFolder, muster, run};

const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const GET: &[u8] = b"GET /api/v1/handshakes HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

/// A folder of certificates and the authority that issues them.
struct CertificateFolder {
    folder: TempFolder,
    ours: CertificateAuthority,
}

impl CertificateFolder {
    fn new(name: &str) -> Self {
        let folder = TempFolder::new(&format!("tls-{name}"));
        let desk = Self { folder, ours: CertificateAuthority::new(&format!("authority of {name}")).unwrap() };
        std::fs::write(desk.certificate_path("ca"), desk.ours.certificate_pem()).unwrap();
        desk.write_certificate_and_key(
            "server",
            desk.ours.issue_certificate(CertificatePurpose::Server, &["localhost".into()], 90).unwrap(),
        );
        desk.write_certificate_and_key(
            "client",
            desk.ours.issue_certificate(CertificatePurpose::Client, &["right".into()], 90).unwrap(),
        );
        desk
    }

    fn certificate_path(&self, name: &str) -> PathBuf {
        self.folder.0.join(format!("{name}.pem"))
    }

    fn write_certificate_and_key(&self, name: &str, made: IssuedCertificate) {
        // The files are replaced atomically, as tools that renew certificates do.
        for (name, text) in [(format!("{name}-key"), made.key), (name.into(), made.cert)] {
            let new = self.certificate_path(&format!("{name}-new"));
            std::fs::write(&new, text).unwrap();
            std::fs::rename(new, self.certificate_path(&name)).unwrap();
        }
    }

    /// Returns the settings of a listener.
    fn listener_tls_arguments(&self, edge: &str, mode: &str) -> Vec<String> {
        let all = [("cert", "server"), ("key", "server-key"), ("client-ca", "ca")];
        let file = |(key, name): (&str, &str)| {
            [format!("--{edge}-tls-{key}"), self.certificate_path(name).display().to_string()]
        };
        let mut settings: Vec<String> = all.into_iter().flat_map(file).collect();
        settings.extend([format!("--{edge}-tls-mode"), mode.to_owned()]);
        settings
    }

    /// Sends a request over TLS and returns the response.
    async fn send_request_over_tls(
        &self,
        address: &str,
        client: Option<&str>,
        protocol: &[u8],
        words: &[u8],
    ) -> Result<Vec<u8>, String> {
        let (cert, key) = (
            self.certificate_path(client.unwrap_or("client")),
            self.certificate_path(&format!("{}-key", client.unwrap_or("client"))),
        );
        let own: Option<(&Path, &Path)> = client.map(|_| (&*cert, &*key));
        let config = tls::client_config(&self.certificate_path("ca"), own, &[protocol]).unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let talk = async {
            let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
            stream.write_all(words).await?;
            let mut answer = vec![0; 64 << 10];
            let mut length = stream.read(&mut answer).await?;
            if protocol == b"http/1.1" {
                while let Ok(more @ 1..) = stream.read(&mut answer[length..]).await {
                    length += more;
                }
            }
            answer.truncate(length);
            std::io::Result::Ok(answer)
        };
        let answer = tokio::time::timeout(Duration::from_secs(20), talk).await.expect("an answer in time");
        match answer {
            Ok(answer) if !answer.is_empty() => Ok(answer),
            Ok(_) => Err("closed".into()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Returns a self-signed certificate without names.
fn self_signed_certificate(name: &str) -> IssuedCertificate {
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    let cert = params.self_signed(&key).unwrap();
    IssuedCertificate { cert: cert.pem(), key: key.serialize_pem() }
}

/// Starts a server. Returns it with its addresses.
fn start_server(settings: &[String]) -> (MusterServer, String, String) {
    let settings = settings.iter().map(String::as_str);
    let server = MusterServer::start(&["--tasks", "1"].into_iter().chain(settings).collect::<Vec<_>>());
    let (grpc, http) = (server.grpc.to_string(), server.http.to_string());
    (server, grpc, http)
}

async fn send_plaintext_request(address: &str, words: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(words).await.unwrap();
    let mut answer = Vec::new();
    let mut piece = vec![0; 64 << 10];
    let read = async {
        while let Ok(length @ 1..) = stream.read(&mut piece).await {
            answer.extend_from_slice(&piece[..length]);
            if words == HTTP2 {
                break;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), read).await.expect("an answer in time");
    answer
}

async fn fetch_handshake_failures(http: &str) -> HandshakeFailuresView {
    parse_handshake_failures(&send_plaintext_request(http, GET).await)
}

fn parse_handshake_failures(answer: &[u8]) -> HandshakeFailuresView {
    let text = String::from_utf8_lossy(answer).into_owned();
    let body = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}")).1;
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[tokio::test]
async fn only_the_right_certificate_gets_in_and_the_server_says_what_is_wrong_with_others() {
    let desk = CertificateFolder::new("right");
    let theirs = CertificateAuthority::new("another authority").unwrap();
    desk.write_certificate_and_key(
        "foreign",
        theirs.issue_certificate(CertificatePurpose::Client, &["foreign".into()], 90).unwrap(),
    );
    desk.write_certificate_and_key(
        "old",
        desk.ours.issue_certificate(CertificatePurpose::Client, &["old".into()], -1).unwrap(),
    );
    desk.write_certificate_and_key(
        "wrong-use",
        desk.ours.issue_certificate(CertificatePurpose::Server, &["wrong-use".into()], 90).unwrap(),
    );
    desk.write_certificate_and_key("itself", self_signed_certificate("itself"));
    let (mut running, grpc, http) = start_server(&desk.listener_tls_arguments("grpc", "required"));
    assert!(desk.send_request_over_tls(&grpc, Some("client"), b"h2", HTTP2).await.is_ok());
    for (client, reason) in [
        (Some("foreign"), "no authority that this port trusts has issued it"),
        (Some("old"), "it has expired"),
        (Some("wrong-use"), "lacks clientAuth"),
        (Some("itself"), "refused: it is the certificate of an authority"),
        (None, "the client showed no certificate"),
    ] {
        desk.send_request_over_tls(&grpc, client, b"h2", HTTP2).await.unwrap_err();
        let line = running.err_line(reason);
        assert!(line.contains("localhost"), "the name that was dialled: {line}");
        let page = fetch_handshake_failures(&http).await;
        let latest = &page.handshakes[0];
        assert!(latest.reason.contains(reason), "{latest:?}");
        assert_eq!(latest.name.as_deref(), Some("localhost"));
        let shown = latest.shown.as_deref().unwrap_or_default();
        assert!(client.is_none_or(|name| shown.contains(&format!("CN={name}"))), "{shown:?}");
        assert_eq!(shown.contains(", no names,"), client == Some("itself"), "{shown:?}");
    }
    desk.send_request_over_tls(&grpc, Some("client"), b"smtp", HTTP2).await.unwrap_err();
    assert_eq!(send_plaintext_request(&grpc, HTTP2).await, b"");
    running.err_line("the client speaks plaintext");
    send_plaintext_request(&grpc, b"\x16\x03\x01\x00\x05garbage and more of it").await;
    running.err_line("what the client sent is no TLS");
    let page = fetch_handshake_failures(&http).await;
    assert!((page.succeeded, page.failed) >= (1, 8), "{page:?}");
    assert!(desk.send_request_over_tls(&grpc, Some("client"), b"h2", HTTP2).await.is_ok());

    let check = |arguments: &[&str]| {
        let path = |name: &str| desk.certificate_path(name).display().to_string();
        let mut command = muster(["tls", "check", "--ca", &path("ca")]);
        run(command.args(arguments.iter().map(|argument| match argument.strip_prefix('@') {
            Some(name) => path(name),
            None => (*argument).to_owned(),
        })))
    };
    let port = grpc.rsplit(':').next().unwrap();
    let server = format!("localhost:{port}");
    let good = check(&["--cert", "@client", "--key", "@client-key", "--server", &server]);
    assert!(good.code == Some(0) && good.out.contains("the server takes this client"), "{good:?}");
    let old = check(&["--cert", "@old", "--key", "@client-key", "--server", &server]);
    assert!(
        old.code == Some(1) && old.out.contains("expired") && old.out.contains("another certificate"),
        "{old:?}"
    );
    let itself = check(&["--cert", "@itself", "--for", "client"]);
    let says =
        ["WRONG it is the certificate of an authority", "does not vouch for it: it is the certificate of"];
    assert!(itself.code == Some(1) && says.iter().all(|words| itself.out.contains(words)), "{itself:?}");
    assert!(!itself.out.contains("CaUsed") && !itself.out.contains("Other("), "{itself:?}");
    let name = check(&["--cert", "@server", "--key", "@server-key", "--name", "10.0.0.1"]);
    assert!(name.code == Some(1) && name.out.contains("it is not for 10.0.0.1"), "{name:?}");
}

#[tokio::test]
async fn both_listeners_tell_tls_from_plaintext_by_the_first_byte() {
    let desk = CertificateFolder::new("both");
    let mut settings = desk.listener_tls_arguments("grpc", "optional");
    settings.extend(desk.listener_tls_arguments("http", "optional"));
    let (_running, grpc, http) = start_server(&settings);
    assert!(!send_plaintext_request(&grpc, HTTP2).await.is_empty());
    assert!(desk.send_request_over_tls(&grpc, Some("client"), b"h2", HTTP2).await.is_ok());
    assert_eq!(fetch_handshake_failures(&http).await.succeeded, 1);
    let answer = desk.send_request_over_tls(&http, Some("client"), b"http/1.1", GET).await.unwrap();
    assert!(String::from_utf8_lossy(&answer).to_lowercase().contains("strict-transport-security"));
    assert_eq!(parse_handshake_failures(&answer).failed, 0);

    let (_running, _, http) = start_server(&desk.listener_tls_arguments("http", "required"));
    let told = String::from_utf8_lossy(&send_plaintext_request(&http, GET).await).into_owned();
    assert!(told.contains("400") && told.contains("https://"), "{told}");
    let answer = desk.send_request_over_tls(&http, Some("client"), b"http/1.1", GET).await.unwrap();
    assert_eq!(parse_handshake_failures(&answer).handshakes[0].listener, "http");
    let status = |arguments: &[&str]| {
        let port = http.rsplit(':').next().unwrap();
        run(muster(["status", "--server", &format!("https://localhost:{port}")]).args(arguments))
    };
    let path = |name: &str| desk.certificate_path(name).display().to_string();
    let seen = status(&["--ca", &path("ca"), "--cert", &path("client"), "--key", &path("client-key")]);
    assert_eq!(seen.code, Some(0), "{seen:?}");
}

#[tokio::test]
async fn new_certificates_are_taken_without_a_restart_and_broken_ones_are_not() {
    let desk = CertificateFolder::new("rotation");
    let (mut running, grpc, _http) = start_server(&desk.listener_tls_arguments("grpc", "required"));
    assert!(desk.send_request_over_tls(&grpc, Some("client"), b"h2", HTTP2).await.is_ok());
    desk.write_certificate_and_key(
        "server",
        desk.ours.issue_certificate(CertificatePurpose::Server, &["elsewhere".into()], 90).unwrap(),
    );
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let error = desk.send_request_over_tls(&grpc, Some("client"), b"h2", HTTP2).await.unwrap_err();
    assert!(error.contains("not valid for name"), "{error}");
    running.err_line("certificates were read again");
    std::fs::write(desk.certificate_path("server"), "nonsense").unwrap();
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let error = desk.send_request_over_tls(&grpc, Some("client"), b"h2", HTTP2).await.unwrap_err();
    assert!(error.contains("not valid for name"), "{error}");
    running.err_line("the former ones stay in use");
}

#[tokio::test]
async fn a_stalled_tls_handshake_is_closed() {
    let desk = CertificateFolder::new("slow");
    let engine = Engine::new(Clock::start());
    let failures = Arc::new(HandshakeFailures::new(*engine.clock()));
    let files = TlsFiles {
        cert: desk.certificate_path("server"),
        key: desk.certificate_path("server-key"),
        client_ca: Some(desk.certificate_path("ca")),
    };
    let kept = (*engine.clock(), Arc::clone(&failures));
    let entrance = TransportPolicy::new("grpc", TlsMode::Required, Some(files), &[b"h2"], kept).unwrap();
    let limits = GrpcLimits { handshake: Duration::from_millis(200), ..GrpcLimits::default() };
    let server = grpc::GrpcServer::with_transport_policy(entrance, engine, limits, None);
    let listener = grpc::bind_listener(([127, 0, 0, 1], 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    let stop = watch::Sender::new(false);
    tokio::spawn(Arc::clone(&server).serve(
        listener,
        ListenerJobRule::ByAuthority(None),
        stop.subscribe(),
        None,
    ));
    // The head of a TLS record that announces more bytes than are sent.
    let mut many = Vec::new();
    for _ in 0..50 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"\x16\x03\x01\x40\x00\x01").await.unwrap();
        many.push(stream);
    }
    for mut stream in many {
        let mut rest = Vec::new();
        let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut rest)).await;
        read.expect("it is closed").unwrap_or_default();
    }
    let page = failures.to_view();
    assert_eq!((page.handshakes.len(), page.failed), (1, 50));
    assert!(page.handshakes[0].reason.contains("did not finish the handshake within 200ms"), "{page:?}");
    assert_eq!(server.counters().connections, 0);
}
