//! Implements `muster tls`: creates test certificates, and checks certificates and the TLS of a server.
//!
//! The module `tls` implements TLS itself. Begin at `run`, then `check_certificate_files`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::output::{TerminalLine, TerminalText, print};
use super::server_args::block_on_requests;
use crate::tls::check::{self, CertificateFindings, CheckSeverity, IntendedCertificateUse};
use crate::tls::{self, certificate_authority};

/// The time that a server has to answer.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
/// The beginning of an HTTP/2 connection: the preface, and empty settings.
const HTTP2_BEGIN: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Create test certificates, and find errors in certificates
///
/// JAX programs (jaxlib 0.11.2 and later) use mutual TLS if three variables are set; they need no other
/// change: JAX_MTLS_CERT_FILE, JAX_MTLS_KEY_FILE and JAX_MTLS_CA_FILE. They do not report an error in one of
/// the files, but retry until their timeout. The server's log and `/api/v1/handshakes` have the reason, and
/// so does `muster tls check`.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  Try mutual TLS on this machine:
    muster tls new certs
    muster serve --tasks 2 --grpc-tls-cert certs/server.pem --grpc-tls-key certs/server-key.pem \\
      --grpc-tls-client-ca certs/ca.pem
    export JAX_MTLS_CERT_FILE=certs/client.pem JAX_MTLS_KEY_FILE=certs/client-key.pem \\
      JAX_MTLS_CA_FILE=certs/ca.pem

  Why does a task not connect?
    muster tls check --cert certs/client.pem --key certs/client-key.pem --ca certs/ca.pem \\
      --server muster.example:8476";

#[derive(Debug, Subcommand)]
enum Command {
    New(NewCertificateArgs),
    Check(CheckArgs),
}

/// Create a small authority, a certificate for a server and one for its clients
///
/// They are valid for 90 days and are for tests: the authority's own key is not kept. Nothing is overwritten.
#[derive(Debug, Args)]
struct NewCertificateArgs {
    /// The folder for the files
    #[arg(value_name = "DIR")]
    folder: PathBuf,

    /// The names and addresses that clients dial
    #[arg(long = "name", value_name = "NAME|IP", default_values = ["localhost", "*.localhost", "127.0.0.1", "::1"])]
    names: Vec<String>,
}

/// Report the errors of a certificate, and whether a server accepts it
#[derive(Debug, Args)]
struct CheckArgs {
    /// The certificate, with the intermediate certificates
    #[arg(long, value_name = "FILE")]
    cert: Option<PathBuf>,

    /// Its private key
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,

    /// The authorities that the other side trusts
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// The purpose of the certificate; with --server it is a client's, and without both it is what the
    /// certificate states
    #[arg(long = "for", value_name = "WHAT", value_enum)]
    purpose: Option<CertificateUse>,

    /// The name or address that clients dial
    #[arg(long, value_name = "NAME|IP")]
    name: Option<String>,

    /// A server to connect to, with the certificate as a client's
    #[arg(long, value_name = "HOST:PORT", requires = "ca")]
    server: Option<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum CertificateUse {
    /// A server's
    Server,
    /// A client's
    Client,
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    match &arguments.command {
        Command::New(new) => {
            certificate_authority::write_trial_certificates(&new.folder, &new.names)?;
            let folder = new.folder.display();
            print(&TerminalText::from_escaped_text(&format!(
                "Made in {folder}, for {} days: ca.pem, server.pem, server-key.pem, client.pem, client-key.pem\n\
                 Serve with: --grpc-tls-cert {folder}/server.pem --grpc-tls-key {folder}/server-key.pem \
                 --grpc-tls-client-ca {folder}/ca.pem\n\
                 Start tasks with: JAX_MTLS_CERT_FILE={folder}/client.pem JAX_MTLS_KEY_FILE={folder}/client-key.pem \
                 JAX_MTLS_CA_FILE={folder}/ca.pem\n",
                certificate_authority::VALIDITY_DAYS
            )))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Check(check) => {
            let found = check_certificate_files(check)?;
            print(&found.0.iter().map(TerminalLine::from).collect())?;
            Ok(ExitCode::from(u8::from(found.has_errors())))
        }
    }
}

fn check_certificate_files(asked: &CheckArgs) -> Result<CertificateFindings> {
    let mut found = CertificateFindings::default();
    if asked.cert.is_none() && asked.server.is_none() {
        bail!("nothing to check: give --cert FILE, or --server HOST:PORT with --ca FILE, or all of them");
    }
    if let Some(cert) = &asked.cert {
        let chain = tls::read_certificates(cert)?;
        let purpose = match asked.purpose {
            _ if asked.server.is_some() => certificate_authority::CertificatePurpose::Client,
            Some(CertificateUse::Client) => certificate_authority::CertificatePurpose::Client,
            Some(CertificateUse::Server) => certificate_authority::CertificatePurpose::Server,
            // A name that clients dial implies a server certificate.
            None if asked.name.is_some() => certificate_authority::CertificatePurpose::Server,
            None => check::stated_certificate_purpose(&chain)
                .unwrap_or(certificate_authority::CertificatePurpose::Server),
        };
        let client = purpose == certificate_authority::CertificatePurpose::Client;
        let wanted = IntendedCertificateUse { purpose, name: asked.name.as_deref().filter(|_| !client) };
        // The rules of a server for the issuers of client certificates are unknown here and show in the
        // handshake.
        let ca = asked.ca.as_deref();
        found.0.extend(check::check_chain(&chain, ca, wanted)?.0);
        if let Some(key) = &asked.key {
            check::check_key_matches(cert, key, &mut found)?;
        }
    }
    if let (Some(server), Some(ca)) = (&asked.server, &asked.ca) {
        let own = asked.cert.as_deref().zip(asked.key.as_deref());
        block_on_requests(probe_server(server, asked.name.as_deref(), ca, own, &mut found))?;
    }
    Ok(found)
}

/// Connects to a server as JAX would.
async fn probe_server(
    server: &str,
    name: Option<&str>,
    ca: &Path,
    own: Option<(&Path, &Path)>,
    found: &mut CertificateFindings,
) -> Result<()> {
    let (host, _) = server.rsplit_once(':').context("write the server as HOST:PORT")?;
    let host = name.unwrap_or_else(|| tls::host_without_brackets(host));
    let config = match tls::client_config(ca, own, &[b"h2", b"http/1.1"]) {
        Ok(config) => config,
        Err(error) => {
            found.add(CheckSeverity::Bad, format!("nothing was said to {server}: {error}"));
            return Ok(());
        }
    };
    let dialled =
        ServerName::try_from(host.to_owned()).with_context(|| format!("{host:?} is no name of a host"))?;
    let stream = tokio::time::timeout(CHECK_TIMEOUT, TcpStream::connect(server))
        .await
        .context("no connection in time")?
        .with_context(|| format!("cannot reach {server}"))?;
    found.add(CheckSeverity::Good, format!("somebody listens at {server}"));
    let connector = TlsConnector::from(Arc::new(config));
    let shaken = tokio::time::timeout(CHECK_TIMEOUT, connector.connect(dialled, stream)).await;
    let mut stream = match shaken {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            let text = format!(
                "no handshake with {server}: {}; the server's log and /api/v1/handshakes say more",
                tls::describe_dial_error(&error)
            );
            found.add(CheckSeverity::Bad, text);
            return Ok(());
        }
        Err(_) => {
            found.add(
                CheckSeverity::Bad,
                format!("{server} does not answer to TLS: it may be a plaintext port"),
            );
            return Ok(());
        }
    };
    let session = stream.get_ref().1;
    let version = session.protocol_version().map_or_else(String::new, |version| format!("{version:?}"));
    found.add(
        CheckSeverity::Good,
        format!("the handshake succeeds, by {version}, and {host} stands in the server's certificate"),
    );
    if session.alpn_protocol() != Some(b"h2") {
        found.add(
            CheckSeverity::Note,
            "the server does not choose HTTP/2 (ALPN h2): JAX would go away; is it the gRPC port?",
        );
        return Ok(());
    }
    // A server refuses a certificate only after the client considers the handshake complete.
    let heard = async {
        stream.write_all(HTTP2_BEGIN).await?;
        stream.flush().await?;
        stream.read_u8().await
    };
    match tokio::time::timeout(CHECK_TIMEOUT, heard).await {
        Ok(Ok(_)) => found.add(CheckSeverity::Good, "the server takes this client and speaks HTTP/2"),
        Ok(Err(error)) => found.add(
            CheckSeverity::Bad,
            format!(
                "the server refuses this client: {}; its log and /api/v1/handshakes say why",
                tls::describe_dial_error(&error)
            ),
        ),
        Err(_) => found.add(CheckSeverity::Bad, "the server says nothing after the handshake"),
    }
    Ok(())
}
