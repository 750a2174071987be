//! Defines the flags for a token, a client certificate and a CA.
//!
//! `client.rs` opens the connection. Begin at `CredentialArgs`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use clap::Args;
use rustls::ClientConfig;

use crate::tls;

/// The flags for the client's credentials and the trusted CA.
#[derive(Debug, Clone, Default, Args)]
pub struct CredentialArgs {
    /// A file with the token; without it, the variable MUSTER_TOKEN may hold the token itself
    #[arg(
        long,
        value_name = "FILE",
        env = "MUSTER_TOKEN_FILE",
        hide_env_values = true,
        help_heading = "Access"
    )]
    token_file: Option<PathBuf>,

    /// The authorities that must have issued the server's certificate [default: those of the system]
    #[arg(long, value_name = "FILE", env = "MUSTER_CA", hide_env_values = true, help_heading = "Access")]
    ca: Option<PathBuf>,

    /// A client certificate, if the server requires one
    #[arg(
        long,
        value_name = "FILE",
        env = "MUSTER_CERT",
        hide_env_values = true,
        help_heading = "Access",
        requires = "key"
    )]
    cert: Option<PathBuf>,

    /// Its private key
    #[arg(
        long,
        value_name = "FILE",
        env = "MUSTER_KEY",
        hide_env_values = true,
        help_heading = "Access",
        requires = "cert"
    )]
    key: Option<PathBuf>,
}

impl CredentialArgs {
    /// Returns the token, if there is one.
    pub fn read_token(&self) -> Result<Option<String>> {
        let text = match &self.token_file {
            Some(path) => Some(
                std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read the token in {}", path.display()))?,
            ),
            None => std::env::var("MUSTER_TOKEN").ok(),
        };
        Ok(text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()))
    }

    /// Returns the TLS configuration of the client.
    pub fn tls_config(&self) -> Result<Arc<ClientConfig>> {
        let ca = self.ca.clone().or_else(tls::system_authorities_path);
        let ca = ca.context("this system has no file of authorities: name one with --ca FILE")?;
        let own = self.cert.as_deref().zip(self.key.as_deref()) as Option<(&Path, &Path)>;
        Ok(Arc::new(tls::client_config(&ca, own, &[b"http/1.1"])?))
    }
}
