//! The certificates by which engines authenticate each other under TLS, signed by one authority. Only wires
//! that leave the host are encrypted.
//!
//! Every engine is client and server, and shows the same certificate as both. Both sides check it in the same
//! way, as a server's, because every engine listens. A certificate for clients only is therefore refused, and
//! `server.pem` of `muster tls new` is accepted.
//!
//! | rule | why |
//! | --- | --- |
//! | The dialled address is not compared with the certificate | Addresses of tasks change, and come from the peers themselves: they prove nothing. What counts is that the peer belongs to the cluster. |
//! | Without a name any certificate of the authority is accepted; with a name, only those for that name | An authority of the cluster's own signs for no others. One that signs for others too needs a name that only engines have. |
//! | TLS 1.3 only, and no session is resumed | Both ends are engines; and every connection shows its certificate. |
//! | Certificates are read when the engine starts | A task lives shorter than a certificate; to renew one, restart the tasks. |

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

use super::traits::WireEnd;

/// The certificate of an engine, and the authorities that it trusts, in PEM. Every engine of a cluster has
/// them, or none has.
#[derive(Clone, PartialEq, Eq)]
pub struct Certificates {
    /// The engine's certificate, with those of the intermediate authorities. It must be valid for a server.
    pub cert: Vec<u8>,
    /// The private key of the certificate.
    pub key: Vec<u8>,
    /// The authorities that must have signed the peers' certificates.
    pub ca: Vec<u8>,
    /// The name that the peers' certificates must be valid for; none to accept every name.
    pub name: Option<String>,
}

impl fmt::Debug for Certificates {
    /// Formats the certificates without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The TLS configurations of an engine, as client and as server.
#[derive(Debug)]
pub struct Identity {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

fn wrong(what: &str, error: impl fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{what}: {error}"))
}

impl Identity {
    /// Creates the configurations of an engine with these certificates.
    ///
    /// # Errors
    /// Returns an error that names the certificate or key that cannot be used.
    pub fn new(certificates: &Certificates) -> io::Result<Self> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let versions = &[&rustls::version::TLS13];
        let chain = read(&certificates.cert, "the engine's certificate")?;
        let key = || {
            PrivateKeyDer::from_pem_slice(&certificates.key)
                .map_err(|error| wrong("the engine's key is none in PEM", error))
        };
        let mut roots = RootCertStore::empty();
        for root in read(&certificates.ca, "the engine's authorities")? {
            roots.add(root).map_err(|error| wrong("an authority cannot be used", error))?;
        }
        let name = certificates.name.clone().map(ServerName::try_from).transpose();
        let name =
            name.map_err(|error| wrong("the name of the engines cannot stand in a certificate", error))?;
        let members =
            Arc::new(Members { roots, name, algorithms: provider.signature_verification_algorithms });
        let unusable = |error: Error| wrong("the engine's certificate and key cannot be used", error);
        let mut client = ClientConfig::builder_with_provider(Arc::<CryptoProvider>::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::<Members>::clone(&members))
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
    pub fn begin(&self, side: WireEnd) -> Result<Connection, Error> {
        Ok(match side {
            WireEnd::Dialled => {
                // The name is neither sent nor checked.
                let nobody = ServerName::from(std::net::IpAddr::from([0; 4]));
                ClientConnection::new(Arc::clone(&self.client), nobody)?.into()
            }
            WireEnd::Accepted => ServerConnection::new(Arc::clone(&self.server))?.into(),
        })
    }
}

fn read(pem: &[u8], what: &str) -> io::Result<Vec<CertificateDer<'static>>> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| wrong(&format!("{what}: not PEM"), error))?;
    if found.is_empty() {
        return Err(wrong(
            what,
            "there is no certificate in it: it should begin with -----BEGIN CERTIFICATE-----",
        ));
    }
    Ok(found)
}

/// The check of certificates, for both sides.
#[derive(Debug)]
struct Members {
    roots: RootCertStore,
    name: Option<ServerName<'static>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Members {
    fn check(
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

    fn signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }
}

fn not_spoken() -> Error {
    Error::General("engines speak TLS 1.3".to_owned())
}

impl ServerCertVerifier for Members {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        _dialled: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(certificate, chain, now).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(not_spoken())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for Members {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(certificate, chain, now).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(not_spoken())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// Returns the text of a TLS error between two engines, with the remedy.
pub fn explain(error: &Error) -> String {
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
