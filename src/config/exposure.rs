//! Refuses an address that other machines can reach, unless it has access control or a setting permits the exposure.
//!
//! `http` and `tls` implement access control. Encryption alone is not access control, because any client can still
//! connect. Required client certificates are access control. Begin at [`Config::check_access_control`].

use super::listener_access::{ExposedAddress, TlsConfig};
use super::{Config, ConfigError};
use crate::tls::{TlsFiles, TlsMode};

impl TlsConfig {
    /// Returns the files, if TLS is on. `edge` is the first word of the settings' names.
    ///
    /// # Errors
    /// If a file is given without another one that it requires.
    pub fn checked_tls_files(&self, edge: &str) -> Result<Option<TlsFiles>, ConfigError> {
        let lacking = |given: &str, lacks: &str| {
            Err(ConfigError::MissingCompanion {
                given: format!("--{edge}-tls-{given}"),
                lacks: format!("--{edge}-tls-{lacks}"),
            })
        };
        match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => {
                let client_ca = self.client_ca.clone();
                Ok(Some(TlsFiles { cert: cert.clone(), key: key.clone(), client_ca }))
            }
            (Some(_), None) => lacking("cert", "key"),
            (None, Some(_)) => lacking("key", "cert"),
            (None, None) if self.client_ca.is_some() => lacking("client-ca", "cert"),
            (None, None) if matches!(self.mode, TlsMode::Optional | TlsMode::Required) => {
                lacking("mode", "cert")
            }
            (None, None) => Ok(None),
        }
    }
}

impl Config {
    /// Checks that no address is open to other machines without access control, unless a setting allows it,
    /// and that TLS has its files.
    ///
    /// # Errors
    /// The first open address, and what to do about it.
    pub fn check_access_control(&self) -> Result<(), ConfigError> {
        let server = &self.server;
        server.grpc_tls.checked_tls_files("grpc")?;
        server.http_tls.checked_tls_files("http")?;
        let known = server.tokens_file.is_some() || server.http_tls.requires_client_certificates();
        let web = [Some(server.http), server.metrics].into_iter().flatten();
        if !(known || server.insecure)
            && let Some(address) = web.into_iter().find(|address| !address.ip().is_loopback())
        {
            return Err(ConfigError::Open(ExposedAddress { edge: "HTTP", address }));
        }
        if server.grpc_tls.requires_client_certificates() || server.insecure_grpc {
            return Ok(());
        }
        let own = self.jobs.iter().filter_map(|job| job.grpc);
        match std::iter::once(server.grpc).chain(own).find(|address| !address.ip().is_loopback()) {
            Some(address) => Err(ConfigError::Open(ExposedAddress { edge: "gRPC", address })),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CommandLineConfig, JobSelection, ServerProfile, load_config};

    fn access_control_error(flags: &[(&'static str, &str)], jobs: &[&str]) -> Option<String> {
        let asked = CommandLineConfig {
            profile: ServerProfile::Serve,
            file: None,
            flags: flags.iter().map(|(key, text)| (*key, (*text).into())).collect(),
            jobs: JobSelection::Declared {
                tasks: None,
                jobs: jobs.iter().map(|job| (*job).into()).collect(),
            },
        };
        load_config(&asked, &|_| None).unwrap().check_access_control().err().map(|error| error.to_string())
    }

    #[test]
    fn exposed_addresses_require_access_control() {
        let everywhere = ("http", "0.0.0.0:8477");
        assert_eq!(access_control_error(&[], &["a=1"]), None);
        assert!(access_control_error(&[everywhere], &[]).unwrap().contains("muster token new"));
        assert_eq!(access_control_error(&[everywhere, ("insecure", "true")], &[]), None);
        assert_eq!(access_control_error(&[everywhere, ("tokens-file", "t")], &[]), None);
        let cert = [everywhere, ("http-tls-cert", "c"), ("http-tls-key", "k")];
        assert!(access_control_error(&cert, &[]).is_some(), "to hide what is said is not to ask who speaks");
        let mutual = [&cert[..], &[("http-tls-client-ca", "ca")]].concat();
        assert_eq!(access_control_error(&mutual, &[]), None);
        let optional = [&mutual[..], &[("http-tls-mode", "optional")]].concat();
        assert!(
            access_control_error(&optional, &[]).is_some(),
            "whoever speaks plaintext shows no certificate"
        );
    }

    #[test]
    fn every_grpc_address_counts() {
        assert!(access_control_error(&[("grpc", "0.0.0.0:1")], &[]).unwrap().contains("--insecure-grpc"));
        assert!(access_control_error(&[], &["a=1@10.0.0.1:1"]).unwrap().contains("10.0.0.1:1"));
        assert_eq!(access_control_error(&[("insecure-grpc", "true")], &["a=1@10.0.0.1:1"]), None);
        let mutual = [("grpc-tls-cert", "c"), ("grpc-tls-key", "k"), ("grpc-tls-client-ca", "ca")];
        assert_eq!(access_control_error(&mutual, &["a=1@10.0.0.1:1"]), None);
        assert!(access_control_error(&mutual[..1], &[]).unwrap().contains("--grpc-tls-key"));
        assert!(
            access_control_error(&[("grpc-tls-mode", "required")], &[]).unwrap().contains("--grpc-tls-cert")
        );
    }
}
