//! Issues the trial certificates of `muster tls new`: a certificate authority, a server certificate and a client
//! certificate.
//!
//! Begin at `write_trial_certificates`.

use std::fs::{DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

/// The validity of the certificates, in days; they are for trials.
pub const VALIDITY_DAYS: i64 = 90;

/// The reason for which no certificates were issued.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    /// A file cannot be written, or exists already.
    #[error("cannot write {file}: {error}")]
    Write {
        /// The file.
        file: String,
        /// The system's error.
        error: io::Error,
    },
    /// A name is not permitted in a certificate.
    #[error("cannot make a certificate: {0}")]
    Make(#[from] rcgen::Error),
}

/// The purpose of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CertificatePurpose {
    /// A server.
    Server,
    /// A client.
    Client,
}

/// An authority that signs certificates. Its keys are P-256, which every JAX release with TLS supports.
pub struct CertificateAuthority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, as PEM.
pub struct IssuedCertificate {
    /// The certificate.
    pub cert: String,
    /// The key.
    pub key: String,
}

impl CertificateAuthority {
    /// Creates an authority.
    ///
    /// # Errors
    /// If the system has no entropy.
    pub fn new(name: &str) -> Result<Self, IssueError> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        set_validity(&mut params, VALIDITY_DAYS);
        Ok(Self(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?))
    }

    /// Returns the authority's own certificate, as PEM.
    #[must_use]
    pub fn certificate_pem(&self) -> String {
        self.0.pem()
    }

    /// Issues a certificate for `names`, valid for `days` from now; a negative number makes an expired one.
    ///
    /// # Errors
    /// If a name is not permitted in a certificate.
    pub fn issue_certificate(
        &self,
        purpose: CertificatePurpose,
        names: &[String],
        days: i64,
    ) -> Result<IssuedCertificate, IssueError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(names)?;
        let common = names.first().map_or("muster", String::as_str);
        params.distinguished_name.push(DnType::CommonName, common);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![match purpose {
            CertificatePurpose::Server => ExtendedKeyUsagePurpose::ServerAuth,
            CertificatePurpose::Client => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        set_validity(&mut params, days);
        let cert = params.signed_by(&key, &self.0)?;
        Ok(IssuedCertificate { cert: cert.pem(), key: key.serialize_pem() })
    }
}

/// Sets the validity from an hour ago, because clocks differ, until `days` from now.
fn set_validity(params: &mut CertificateParams, days: i64) {
    let now = unix_seconds_now();
    let day = 24 * 60 * 60;
    let end = now + days * day;
    let date =
        |at: i64| rcgen::date_time_ymd(1970, 1, 1) + std::time::Duration::from_secs(at.max(0).unsigned_abs());
    params.not_before = date((now - 3600).min(end - day));
    params.not_after = date(end);
}

fn unix_seconds_now() -> i64 {
    let micros = crate::clock::Clock::start().now().0;
    i64::try_from(micros / 1_000_000).unwrap_or_default()
}

/// Returns a unique name for an authority: two with one name are confused, and the error then reports
/// signatures.
fn unique_authority_name() -> String {
    let number = u32::from_be_bytes(crate::clock::random_bytes());
    format!("Muster trial authority {number:08x}")
}

/// Writes `ca.pem`, `server.pem`, `server-key.pem`, `client.pem` and `client-key.pem` into `folder`, which is
/// created if it does not exist. No existing file is overwritten. The authority's own key is not kept: for
/// more certificates, issue all of them anew.
///
/// # Errors
/// If a file cannot be written, or a name is not permitted in a certificate.
pub fn write_trial_certificates(folder: &Path, names: &[String]) -> Result<(), IssueError> {
    let authority = CertificateAuthority::new(&unique_authority_name())?;
    let server = authority.issue_certificate(CertificatePurpose::Server, names, VALIDITY_DAYS)?;
    let client = authority.issue_certificate(
        CertificatePurpose::Client,
        &["muster-client".to_owned()],
        VALIDITY_DAYS,
    )?;
    let make = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    make.map_err(|error| IssueError::Write { file: folder.display().to_string(), error })?;
    for (name, text, mode) in [
        ("ca.pem", authority.certificate_pem(), 0o644),
        ("server.pem", server.cert, 0o644),
        ("server-key.pem", server.key, 0o600),
        ("client.pem", client.cert, 0o644),
        ("client-key.pem", client.key, 0o600),
    ] {
        let path = folder.join(name);
        let written = File::options()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&path)
            .and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| IssueError::Write { file: path.display().to_string(), error })?;
    }
    Ok(())
}
