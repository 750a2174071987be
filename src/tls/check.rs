//! Checks certificates for `muster tls check`: finds the reasons for which a client or a server would refuse one.
//!
//! Begin at `check_chain`.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{CertificateError, Error, RootCertStore, ServerConfig};
use x509_parser::prelude::{FromDer as _, X509Certificate};
use x509_parser::public_key::PublicKey;

use super::certificate_authority::CertificatePurpose;
use super::{TlsError, client_certificates, crypto_provider, files, messages};

/// The remaining validity below which a certificate is reported, in days.
const EXPIRY_WARNING_DAYS: i64 = 30;
/// The object identifiers of Ed25519 and Ed448.
const EDWARDS: [&str; 2] = ["1.3.101.112", "1.3.101.113"];
/// The object identifiers of signatures with SHA-1.
const SHA1: [&str; 2] = ["1.2.840.113549.1.1.5", "1.2.840.10045.4.1"];
const RSA_BITS_MIN: usize = 2048;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckSeverity {
    /// No problem.
    Good,
    /// It works, with a reservation.
    Note,
    /// It does not work.
    Bad,
}

/// One finding about a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFinding {
    /// The severity.
    pub verdict: CheckSeverity,
    /// The finding, and what to do.
    pub text: String,
}

impl fmt::Display for CertificateFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.verdict {
            CheckSeverity::Good => "ok    ",
            CheckSeverity::Note => "note  ",
            CheckSeverity::Bad => "WRONG ",
        };
        write!(f, "{word}{}", self.text)
    }
}

/// The findings about a certificate.
#[derive(Debug, Default)]
pub struct CertificateFindings(pub Vec<CertificateFinding>);

impl CertificateFindings {
    /// Adds a finding.
    pub fn add(&mut self, verdict: CheckSeverity, text: impl Into<String>) {
        self.0.push(CertificateFinding { verdict, text: text.into() });
    }

    /// Returns whether a finding is an error.
    #[must_use]
    pub fn has_errors(&self) -> bool {
        self.0.iter().any(|finding| finding.verdict == CheckSeverity::Bad)
    }
}

/// The intended use of a certificate.
#[derive(Debug, Clone, Copy)]
pub struct IntendedCertificateUse<'a> {
    /// The role of its holder.
    pub purpose: CertificatePurpose,
    /// The name or address that clients dial.
    pub name: Option<&'a str>,
}

/// Returns the stated purpose of a certificate; `None` if it permits both, or states none.
#[must_use]
pub fn stated_certificate_purpose(chain: &[CertificateDer<'_>]) -> Option<CertificatePurpose> {
    let (_, own) = X509Certificate::from_der(chain.first()?).ok()?;
    let usage = own.extended_key_usage().ok()??.value;
    match (usage.server_auth, usage.client_auth) {
        _ if usage.any => None,
        (true, false) => Some(CertificatePurpose::Server),
        (false, true) => Some(CertificatePurpose::Client),
        (true, true) | (false, false) => None,
    }
}

/// Checks a certificate chain, the leaf first.
///
/// # Errors
/// If the file of authorities cannot be read.
pub fn check_chain(
    chain: &[CertificateDer<'_>],
    ca: Option<&Path>,
    wanted: IntendedCertificateUse<'_>,
) -> Result<CertificateFindings, TlsError> {
    let mut found = CertificateFindings::default();
    let Some((own, rest)) = chain.split_first() else {
        found.add(CheckSeverity::Bad, "there is no certificate");
        return Ok(found);
    };
    match X509Certificate::from_der(own) {
        Ok((_, read)) => check_leaf(&read, wanted, &mut found),
        Err(error) => found.add(CheckSeverity::Bad, format!("the certificate cannot be read: {error}")),
    }
    if let Some(ca) = ca {
        check_trust((own, rest), files::read_authority_certificates(ca)?, wanted, &mut found);
    }
    Ok(found)
}

/// Checks whether a key belongs to a certificate.
///
/// # Errors
/// If a file cannot be read.
pub fn check_key_matches(cert: &Path, key: &Path, found: &mut CertificateFindings) -> Result<(), TlsError> {
    let (chain, private) = (files::read_certificates(cert)?, files::read_private_key(key)?);
    let builder =
        ServerConfig::builder_with_provider(crypto_provider()).with_safe_default_protocol_versions();
    let Ok(builder) = builder else { return Ok(()) };
    match builder.with_no_client_auth().with_single_cert(chain, private) {
        Ok(_) => found.add(CheckSeverity::Good, "the key belongs to the certificate"),
        Err(Error::InconsistentKeys(_)) => {
            found.add(
                CheckSeverity::Bad,
                "the key belongs to another certificate: give the two that were made together",
            );
        }
        Err(error) => found.add(CheckSeverity::Bad, format!("the key cannot be used: {error}")),
    }
    Ok(())
}

fn check_leaf(
    read: &X509Certificate<'_>,
    wanted: IntendedCertificateUse<'_>,
    found: &mut CertificateFindings,
) {
    found.add(CheckSeverity::Good, format!("subject {}, issued by {}", read.subject(), read.issuer()));
    check_validity(read, found);
    check_key_kind(read, found);
    check_purpose(read, wanted.purpose, found);
    if read.is_ca() {
        found.add(
            CheckSeverity::Bad,
            "it is the certificate of an authority: make one for this holder and let the authority sign it",
        );
    }
    let names = client_certificates::alternative_names(read);
    if wanted.purpose == CertificatePurpose::Server && names.is_empty() {
        found.add(
            CheckSeverity::Bad,
            "it names no host (no subject alternative name): make one with the names and addresses that clients dial, \
             such as DNS:muster.example or IP:10.0.0.1",
        );
    } else {
        found.add(
            CheckSeverity::Good,
            format!("names: {}", if names.is_empty() { "none".into() } else { names.join(", ") }),
        );
    }
}

fn check_validity(read: &X509Certificate<'_>, found: &mut CertificateFindings) {
    let validity = read.validity();
    let now = UnixTime::now().as_secs().cast_signed();
    let (from, to) = (validity.not_before.timestamp(), validity.not_after.timestamp());
    let hours = (to - now) / (60 * 60);
    if now < from {
        let text = format!("it holds only from {}: look at the clocks, or wait", validity.not_before);
        found.add(CheckSeverity::Bad, text);
    } else if now > to {
        found.add(CheckSeverity::Bad, format!("it has expired on {}: renew it", validity.not_after));
    } else if hours < EXPIRY_WARNING_DAYS * 24 {
        let left = match hours {
            48.. => format!("{} days", hours / 24),
            2.. => format!("{hours} hours"),
            _ => "less than two hours".into(),
        };
        found.add(CheckSeverity::Note, format!("it expires in {left}, on {}", validity.not_after));
    } else {
        found.add(CheckSeverity::Good, format!("it holds until {}", validity.not_after));
    }
}

fn check_key_kind(read: &X509Certificate<'_>, found: &mut CertificateFindings) {
    let algorithm = read.public_key().algorithm.algorithm.to_id_string();
    if EDWARDS.contains(&algorithm.as_str()) {
        found.add(
            CheckSeverity::Bad,
            "its key is Ed25519 or Ed448, which JAX does not know: use P-256 or RSA",
        );
    } else if let Ok(PublicKey::RSA(key)) = read.public_key().parsed() {
        let bits = key.key_size();
        if bits < RSA_BITS_MIN {
            found
                .add(CheckSeverity::Bad, format!("its RSA key has {bits} bits: use at least {RSA_BITS_MIN}"));
        } else {
            found.add(CheckSeverity::Good, format!("its key is RSA with {bits} bits"));
        }
    } else {
        found.add(CheckSeverity::Good, "its key is of an elliptic curve");
    }
    if SHA1.contains(&read.signature_algorithm.algorithm.to_id_string().as_str()) {
        found.add(CheckSeverity::Bad, "it is signed with SHA-1, which is taken nowhere any more: renew it");
    }
}

fn check_purpose(read: &X509Certificate<'_>, purpose: CertificatePurpose, found: &mut CertificateFindings) {
    let (word, whom) = match purpose {
        CertificatePurpose::Server => ("serverAuth", "servers"),
        CertificatePurpose::Client => ("clientAuth", "clients"),
    };
    let Ok(Some(usage)) = read.extended_key_usage() else {
        return found.add(CheckSeverity::Good, "it does not say what it may be used for, which is fine");
    };
    let fits = match purpose {
        CertificatePurpose::Server => usage.value.server_auth,
        CertificatePurpose::Client => usage.value.client_auth,
    };
    if fits || usage.value.any {
        found.add(CheckSeverity::Good, format!("it may be used by {whom}"));
    } else {
        let text = format!("it may not be used by {whom}: its extended key usage lacks {word}");
        found.add(CheckSeverity::Bad, text);
    }
}

/// Checks whether a peer that trusts `roots` would accept the certificate.
fn check_trust(
    (own, rest): (&CertificateDer<'_>, &[CertificateDer<'_>]),
    roots: RootCertStore,
    wanted: IntendedCertificateUse<'_>,
    found: &mut CertificateFindings,
) {
    let now = UnixTime::now();
    let roots = Arc::new(roots);
    let judged = match wanted.purpose {
        CertificatePurpose::Client => WebPkiClientVerifier::builder_with_provider(roots, crypto_provider())
            .build()
            .map(|verifier| verifier.verify_client_cert(own, rest, now).map(drop)),
        CertificatePurpose::Server => {
            let dialled = wanted.name.and_then(|name| ServerName::try_from(name.to_owned()).ok());
            // An address that no certificate contains: the only remaining error is then the name.
            let name = dialled.unwrap_or_else(|| std::net::IpAddr::from([0, 0, 0, 0]).into());
            WebPkiServerVerifier::builder_with_provider(roots, crypto_provider())
                .build()
                .map(|verifier| verifier.verify_server_cert(own, rest, &name, &[], now).map(drop))
        }
    };
    let judged = match judged {
        Ok(judged) => judged,
        Err(error) => {
            return found.add(CheckSeverity::Bad, format!("the authorities cannot be used: {error}"));
        }
    };
    let misnamed = |error: &CertificateError| {
        matches!(error, CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. })
    };
    match judged {
        Ok(()) => match wanted.name {
            Some(name) => found.add(CheckSeverity::Good, format!("the authority vouches for it, as {name}")),
            None => found.add(CheckSeverity::Good, "the authority vouches for it"),
        },
        Err(Error::InvalidCertificate(error)) if misnamed(&error) => match wanted.name {
            None => found.add(CheckSeverity::Good, "the authority vouches for it"),
            Some(name) => found.add(
                CheckSeverity::Bad,
                format!(
                    "it is not for {name}: clients that dial that go away; an address needs an IP entry, a name a DNS entry"
                ),
            ),
        },
        Err(Error::InvalidCertificate(CertificateError::UnknownIssuer)) => found.add(
            CheckSeverity::Bad,
            "no authority in the CA file has issued it: give the right CA file, or put the certificates in between behind it",
        ),
        Err(Error::InvalidCertificate(error)) => found.add(
            CheckSeverity::Bad,
            format!("the authority does not vouch for it: {}", messages::describe_certificate_error(&error)),
        ),
        Err(error) => found.add(CheckSeverity::Bad, format!("the authority does not vouch for it: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::pem::PemObject as _;

    use super::*;
    use crate::tls::certificate_authority::CertificateAuthority;

    fn findings_about_chain(
        authority: &CertificateAuthority,
        by: &CertificateAuthority,
        purpose: CertificatePurpose,
        names: &[&str],
        days: i64,
    ) -> String {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let made = by.issue_certificate(purpose, &names, days).unwrap();
        let ca =
            std::env::temp_dir().join(format!("muster-check-{}-{purpose:?}-{days}.pem", std::process::id()));
        std::fs::write(&ca, authority.certificate_pem()).unwrap();
        let own = CertificateDer::from_pem_slice(made.cert.as_bytes()).unwrap();
        let wanted =
            IntendedCertificateUse { purpose: CertificatePurpose::Server, name: Some("muster.example") };
        let found = check_chain(&[own], Some(&ca), wanted).unwrap();
        std::fs::remove_file(&ca).unwrap();
        found.0.iter().map(|finding| format!("{finding}\n")).collect()
    }

    #[test]
    fn every_flaw_of_a_certificate_has_a_message() {
        let (ours, theirs) =
            (CertificateAuthority::new("ours").unwrap(), CertificateAuthority::new("theirs").unwrap());
        let good = findings_about_chain(
            &ours,
            &ours,
            CertificatePurpose::Server,
            &["muster.example", "10.0.0.1"],
            90,
        );
        assert!(!good.contains("WRONG") && good.contains("IP:10.0.0.1"), "{good}");
        let old = findings_about_chain(&ours, &ours, CertificatePurpose::Server, &["muster.example"], -1);
        assert!(old.contains("WRONG it has expired"), "{old}");
        let soon = findings_about_chain(&ours, &ours, CertificatePurpose::Server, &["muster.example"], 5);
        assert!(soon.contains("note  it expires in ") && soon.contains(" days, on "), "{soon}");
        let now = findings_about_chain(&ours, &ours, CertificatePurpose::Server, &["muster.example"], 1);
        // 24 hours, or slightly less.
        assert!(now.contains("note  it expires in 2") && now.contains(" hours, on "), "{now}");
        let other = findings_about_chain(&ours, &ours, CertificatePurpose::Server, &["other.example"], 91);
        assert!(other.contains("WRONG it is not for muster.example"), "{other}");
        let foreign =
            findings_about_chain(&ours, &theirs, CertificatePurpose::Server, &["muster.example"], 92);
        assert!(foreign.contains("WRONG no authority"), "{foreign}");
        let client = findings_about_chain(&ours, &ours, CertificatePurpose::Client, &["muster.example"], 93);
        assert!(client.contains("lacks serverAuth"), "{client}");
    }
}
