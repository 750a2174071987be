//! Verifies client certificates, records a refused certificate, and returns the name of a certificate's holder.
//!
//! If the server has no tokens, `http::access` uses the holder's name as the name of the actor. The error of a failed
//! handshake does not name the certificate, and JAX does not report that it presented one. The verifier therefore
//! records the certificate that it refuses. Begin at [`RecordingClientVerifier`].

use std::cell::RefCell;
use std::fmt::Write as _;
use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// The greatest length of a certificate's description.
const SHOWN_BYTES: usize = 400;

tokio::task_local! {
    /// The certificate that the client of the present handshake sent, if it was refused.
    pub(super) static REFUSED_CERTIFICATE: RefCell<Option<String>>;
}

/// The verifier of client certificates. It delegates to `rustls` and records a refused certificate, because
/// the handshake's own error does not say which certificate it was about.
#[derive(Debug)]
pub(super) struct RecordingClientVerifier(Arc<dyn ClientCertVerifier>);

impl RecordingClientVerifier {
    pub(super) fn new(verifier: Arc<dyn ClientCertVerifier>) -> Self {
        Self(verifier)
    }
}

impl ClientCertVerifier for RecordingClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.0.verify_client_cert(certificate, chain, now).inspect_err(|_| {
            // Outside of a handshake nothing reads the record.
            let _ =
                REFUSED_CERTIFICATE.try_with(|shown| shown.replace(Some(describe_certificate(certificate))));
        })
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }

    fn offer_client_auth(&self) -> bool {
        self.0.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }
}

/// Returns a description of a certificate in one line.
fn describe_certificate(certificate: &CertificateDer<'_>) -> String {
    let Ok((_, read)) = X509Certificate::from_der(certificate) else {
        return "something that is no certificate".into();
    };
    let validity = read.validity();
    let mut text = format!("subject {}, issuer {}", read.subject(), read.issuer());
    // Writing to a string cannot fail.
    let _ = match &alternative_names(&read)[..] {
        [] => write!(text, ", no names"),
        names => write!(text, ", names {}", names.join(" ")),
    };
    let _ = write!(text, ", valid from {} to {}", validity.not_before, validity.not_after);
    let mut shown = crate::text::escape_to_one_line(&text).into_owned();
    shown.truncate(shown.floor_char_boundary(SHOWN_BYTES));
    shown
}

/// Returns the subject alternative names of a certificate, as people write them.
pub(super) fn alternative_names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let Ok(Some(found)) = certificate.subject_alternative_name() else { return Vec::new() };
    found.value.general_names.iter().map(alternative_name_text).collect()
}

fn alternative_name_text(name: &GeneralName<'_>) -> String {
    match name {
        GeneralName::DNSName(name) => format!("DNS:{name}"),
        GeneralName::URI(uri) => format!("URI:{uri}"),
        GeneralName::IPAddress(bytes) => match <[u8; 4]>::try_from(*bytes) {
            Ok(four) => format!("IP:{}", std::net::Ipv4Addr::from(four)),
            Err(_) => <[u8; 16]>::try_from(*bytes)
                .map_or_else(|_| "IP:?".into(), |bytes| format!("IP:{}", std::net::Ipv6Addr::from(bytes))),
        },
        other => other.to_string(),
    }
}

/// Returns the name of a certificate's holder: its common name, else its first alternative name.
#[must_use]
pub fn certificate_holder_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, read) = X509Certificate::from_der(certificate).ok()?;
    let common = read.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
    let mut found = common.map(str::to_owned).or_else(|| alternative_names(&read).into_iter().next())?;
    found.truncate(found.floor_char_boundary(100));
    Some(crate::text::escape_to_one_line(&found).into_owned())
}
