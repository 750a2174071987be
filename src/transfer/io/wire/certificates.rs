//! The certificates by which engines authenticate each other under TLS. Only wires that leave the host are encrypted.
//!
//! Every engine is a client and a server, and presents the same certificate in both roles. Because every engine
//! listens, both sides check the peer's certificate as that of a server. So `server.pem` of `muster tls new` is
//! accepted, and a certificate for clients only is refused. The rules are:
//!
//! - An authority that the engine trusts must have signed the peer's certificate.
//! - The dialled address is not compared with the certificate. Addresses of tasks change, and come from the peers
//!   themselves, so they prove nothing. The peer only has to belong to the cluster.
//! - If the engine has no name for its peers, it accepts any certificate of its authorities. This suits an authority
//!   that signs only for the cluster. If the engine has a name, it accepts only certificates for that name. An
//!   authority that also signs for others needs such a name, which only engines have.
//! - Engines use TLS 1.3 only, and resume no session. Both ends are engines, and each must present its certificate on
//!   every wire.
//! - An engine reads certificates when it starts. A task ends before its certificate expires. To renew a certificate,
//!   restart the tasks.
//!
//! [`tls`](super::tls) wraps the wires. Begin at [`PemCertificates`] and [`EngineTlsConfigs::new_connection`].

use std::fmt;
use std::io;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    AlertDescription, ClientConfig, ClientConnection, Connection, DigitallySignedStruct, DistinguishedName,
    Error, RootCertStore, ServerConfig, ServerConnection, SignatureScheme,
};

use super::traits::HandshakeRole;

/// The certificate of an engine, and the authorities that it trusts, in PEM. Every engine of a cluster has
/// them, or none has.
#[derive(Clone, PartialEq, Eq)]
pub struct PemCertificates {
    /// The engine's certificate, with those of the intermediate authorities. It must be valid for a server.
    pub cert: Vec<u8>,
    /// The private key of the certificate.
    pub key: Vec<u8>,
    /// The authorities that must have signed the peers' certificates.
    pub ca: Vec<u8>,
    /// The name that the peers' certificates must be valid for; none to accept every name.
    pub name: Option<String>,
}

impl fmt::Debug for PemCertificates {
    /// Formats the certificates without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PemCertificates").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The TLS configurations of an engine, as client and as server.
#[derive(Debug)]
pub struct EngineTlsConfigs {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

fn invalid_pem(what: &str, error: impl fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{what}: {error}"))
}

impl EngineTlsConfigs {
    /// Creates the configurations of an engine with these certificates.
    ///
    /// # Errors
    /// Returns an error that names the certificate or key that cannot be used.
    pub fn new(certificates: &PemCertificates) -> io::Result<Self> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let versions = &[&rustls::version::TLS13];
        let chain = parse_certificates(&certificates.cert, "the engine's certificate")?;
        let key = || {
            PrivateKeyDer::from_pem_slice(&certificates.key)
                .map_err(|error| invalid_pem("the engine's key is none in PEM", error))
        };
        let mut roots = RootCertStore::empty();
        for root in parse_certificates(&certificates.ca, "the engine's authorities")? {
            roots.add(root).map_err(|error| invalid_pem("an authority cannot be used", error))?;
        }
        let name = certificates.name.clone().map(ServerName::try_from).transpose();
        let name = name
            .map_err(|error| invalid_pem("the name of the engines cannot stand in a certificate", error))?;
        let members = Arc::new(PeerCertificateVerifier {
            roots,
            name,
            algorithms: provider.signature_verification_algorithms,
        });
        let unusable = |error: Error| invalid_pem("the engine's certificate and key cannot be used", error);
        let mut client = ClientConfig::builder_with_provider(Arc::<CryptoProvider>::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::<PeerCertificateVerifier>::clone(&members))
            .with_client_auth_cert(chain.clone(), key()?)
            .map_err(unusable)?;
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(unusable)?
            .with_client_cert_verifier(members)
            .with_single_cert(chain, key()?)
            .map_err(unusable)?;
        server.send_tls13_tickets = 0;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }

    /// Creates a TLS connection for one side of a wire.
    pub fn new_connection(&self, side: HandshakeRole) -> Result<Connection, Error> {
        Ok(match side {
            HandshakeRole::Dialled => {
                // The name is neither sent nor checked.
                let nobody = ServerName::from(std::net::IpAddr::from([0; 4]));
                ClientConnection::new(Arc::clone(&self.client), nobody)?.into()
            }
            HandshakeRole::Accepted => ServerConnection::new(Arc::clone(&self.server))?.into(),
        })
    }
}

fn parse_certificates(pem: &[u8], what: &str) -> io::Result<Vec<CertificateDer<'static>>> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| invalid_pem(&format!("{what}: not PEM"), error))?;
    if found.is_empty() {
        return Err(invalid_pem(
            what,
            "there is no certificate in it: it should begin with -----BEGIN CERTIFICATE-----",
        ));
    }
    Ok(found)
}

/// The check of certificates, for both sides.
#[derive(Debug)]
struct PeerCertificateVerifier {
    roots: RootCertStore,
    name: Option<ServerName<'static>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl PeerCertificateVerifier {
    fn verify_chain(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        let certificate = ParsedCertificate::try_from(certificate)?;
        let algorithms = self.algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&certificate, &self.roots, chain, now, algorithms)?;
        self.name.as_ref().map_or(Ok(()), |name| verify_server_name(&certificate, name))
    }

    fn verify_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }
}

fn unsupported_tls_version() -> Error {
    Error::General("engines speak TLS 1.3".to_owned())
}

impl ServerCertVerifier for PeerCertificateVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        _dialled: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verify_chain(certificate, chain, now).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(unsupported_tls_version())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for PeerCertificateVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verify_chain(certificate, chain, now).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(unsupported_tls_version())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// Returns the text of a TLS error between two engines, with the remedy.
pub fn explain_tls_error(error: &Error) -> String {
    use rustls::CertificateError as Why;
    let certificate = |why: &Why| {
        match why {
        Why::UnknownIssuer | Why::BadSignature => {
            "its certificate does not come from an authority of this engine: give every engine one that the same \
             authority has signed"
                .to_owned()
        }
        Why::NotValidForName | Why::NotValidForNameContext { .. } => {
            format!("its certificate is not for the name that engines have here: {why}")
        }
        Why::Expired | Why::ExpiredContext { .. } => "its certificate has expired: renew it".to_owned(),
        Why::NotValidYet | Why::NotValidYetContext { .. } => {
            "its certificate does not hold yet: look at the clocks of both hosts".to_owned()
        }
        Why::InvalidPurpose | Why::InvalidPurposeContext { .. } => {
            "its certificate is not good for a server, which every engine is".to_owned()
        }
        why => format!("its certificate is refused: {why}"),
    }
    };
    match error {
        Error::InvalidCertificate(why) => certificate(why),
        Error::NoCertificatesPresented => {
            "it shows no certificate: give every engine one, or none".to_owned()
        }
        Error::InvalidMessage(_) => {
            "it speaks no TLS, and this engine does: give every engine certificates, or none".to_owned()
        }
        Error::AlertReceived(alert) => {
            let why = match alert {
                AlertDescription::UnknownCA => {
                    "it trusts another authority than the one that signed it".to_owned()
                }
                AlertDescription::CertificateExpired => "it has expired".to_owned(),
                AlertDescription::UnsupportedCertificate => {
                    "it is not good for a server, which every engine is".to_owned()
                }
                AlertDescription::BadCertificate => {
                    "it may be for another name than engines have there".to_owned()
                }
                alert => format!("{alert:?}"),
            };
            format!("it turns this engine's certificate away: {why}")
        }
        error => format!("TLS failed: {error}"),
    }
}
