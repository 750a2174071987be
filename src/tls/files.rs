//! Reads certificates, keys and authorities from PEM files, and builds rustls configurations from them.
//!
//! `acceptor.rs` reloads files that have changed. Begin at [`TlsFiles::server_config`].

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::client_certificates::RecordingClientVerifier;
use super::crypto_provider;

/// The greatest length of a certificate file; a longer file is not one.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// The greatest size of early data in a resumed handshake: none, because it could be replayed.
const EARLY_DATA: u32 = 0;

/// The paths of the system's trusted authorities.
const SYSTEM_CA: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// Returns the file of the system's trusted authorities, if there is one.
#[must_use]
pub fn system_authorities_path() -> Option<PathBuf> {
    SYSTEM_CA.into_iter().map(PathBuf::from).find(|path| path.exists())
}

/// The certificate files of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The listener's certificate, followed by the intermediate ones.
    pub cert: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
    /// The authorities of accepted client certificates; `None`: clients need none.
    pub client_ca: Option<PathBuf>,
}

/// The reason for which certificates are unusable.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: String,
    },
    /// The content of a file is invalid.
    #[error("{}: {wrong}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The problem.
        wrong: String,
    },
}

fn content_error(path: &Path, wrong: impl Into<String>) -> TlsError {
    TlsError::Content { path: path.into(), wrong: wrong.into() }
}

fn read_file(path: &Path) -> Result<Vec<u8>, TlsError> {
    let unreadable =
        |error: std::io::Error| TlsError::Unreadable { path: path.into(), error: error.to_string() };
    let length = std::fs::metadata(path).map_err(unreadable)?.len();
    if length > FILE_BYTES_MAX {
        return Err(content_error(path, "this file is far too long for certificates in PEM form"));
    }
    std::fs::read(path).map_err(unreadable)
}

/// Returns the certificates in a file, at least one.
///
/// # Errors
/// If the file cannot be read, or contains none.
pub fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read_file(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| content_error(path, format!("this is not PEM: {error}")))?;
    if found.is_empty() {
        let wrong = "there is no certificate in it: it should begin with -----BEGIN CERTIFICATE-----";
        return Err(content_error(path, wrong));
    }
    Ok(found)
}

/// Returns the private key in a file.
///
/// # Errors
/// If the file cannot be read, or contains none.
pub fn read_private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(&read_file(path)?).map_err(|error| {
        let wrong = match error {
            pem::Error::NoItemsFound => {
                "there is no private key in it (or it is encrypted, which is not supported): it should have a line \
                 -----BEGIN PRIVATE KEY-----"
                    .into()
            }
            other => format!("this is not PEM: {other}"),
        };
        content_error(path, wrong)
    })
}

/// Returns the authorities in a file.
///
/// # Errors
/// If the file cannot be read, or a certificate in it is not an authority's.
pub fn read_authority_certificates(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates(path)? {
        roots
            .add(certificate)
            .map_err(|error| content_error(path, format!("a certificate in it cannot be used: {error}")))?;
    }
    Ok(roots)
}

impl TlsFiles {
    /// Returns all files.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        [Some(&self.cert), Some(&self.key), self.client_ca.as_ref()]
            .into_iter()
            .flatten()
            .map(PathBuf::as_path)
    }

    /// Returns the server configuration for clients that speak one of `protocols`.
    ///
    /// # Errors
    /// If a file is unreadable or unusable, or the key does not belong to the certificate.
    pub fn server_config(&self, protocols: &[&[u8]]) -> Result<ServerConfig, TlsError> {
        let builder = ServerConfig::builder_with_provider(crypto_provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| content_error(&self.cert, error.to_string()))?;
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let roots = Arc::new(read_authority_certificates(path)?);
                let clients = WebPkiClientVerifier::builder_with_provider(roots, crypto_provider())
                    .build()
                    .map_err(|error| content_error(path, error.to_string()))?;
                builder.with_client_cert_verifier(Arc::new(RecordingClientVerifier::new(clients)))
            }
        };
        if let Some(better) = crate::file_permissions::check_private_file_permissions(&self.key)
            .map_err(|wrong| content_error(&self.key, wrong))?
        {
            tracing::warn!(file = %self.key.display(), "a private key: {better}");
        }
        let (chain, key) = (read_certificates(&self.cert)?, read_private_key(&self.key)?);
        let mut config = builder.with_single_cert(chain, key).map_err(|error| self.key_error(&error))?;
        config.alpn_protocols = alpn_protocols(protocols);
        config.max_early_data_size = EARLY_DATA;
        Ok(config)
    }

    fn key_error(&self, error: &rustls::Error) -> TlsError {
        let wrong = match error {
            rustls::Error::InconsistentKeys(_) => {
                format!("this key does not belong to the certificate in {}", self.cert.display())
            }
            other => format!("this key cannot be used: {other}"),
        };
        content_error(&self.key, wrong)
    }
}

/// Returns a client configuration that trusts the authorities in `ca`, sends the certificate `own`, and speaks one of
/// `protocols`.
///
/// # Errors
/// If a file is unreadable or unusable.
pub fn client_config(
    ca: &Path,
    own: Option<(&Path, &Path)>,
    protocols: &[&[u8]],
) -> Result<ClientConfig, TlsError> {
    let builder = ClientConfig::builder_with_provider(crypto_provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| content_error(ca, error.to_string()))?
        .with_root_certificates(read_authority_certificates(ca)?);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some((cert, path)) => builder
            .with_client_auth_cert(read_certificates(cert)?, read_private_key(path)?)
            .map_err(|error| content_error(path, format!("this key cannot be used: {error}")))?,
    };
    config.alpn_protocols = alpn_protocols(protocols);
    Ok(config)
}

fn alpn_protocols(protocols: &[&[u8]]) -> Vec<Vec<u8>> {
    protocols.iter().map(|name| name.to_vec()).collect()
}
