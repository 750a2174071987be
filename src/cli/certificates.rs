//! Defines the flags for certificates of transfer engines.
//!
//! `transfer` verifies the certificates. Begin at `TransferCertificateArgs::read_files`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::transfer::PemCertificates;

/// The files with the certificates of a transfer engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
pub struct TransferCertificateArgs {
    /// Encrypt transfers by TCP, and present this certificate to the other workers; it must be valid for a
    /// server
    #[arg(
        long,
        value_name = "FILE",
        env = "MUSTER_TRANSFER_CERT_FILE",
        hide_env_values = true,
        requires = "transfer_key",
        requires = "transfer_ca"
    )]
    transfer_cert: Option<PathBuf>,

    /// Its private key
    #[arg(
        long,
        value_name = "FILE",
        env = "MUSTER_TRANSFER_KEY_FILE",
        hide_env_values = true,
        requires = "transfer_cert"
    )]
    transfer_key: Option<PathBuf>,

    /// The authorities that must have issued the other workers' certificates
    #[arg(
        long,
        value_name = "FILE",
        env = "MUSTER_TRANSFER_CA_FILE",
        hide_env_values = true,
        requires = "transfer_cert"
    )]
    transfer_ca: Option<PathBuf>,

    /// The name that their certificates must have [default: any that the authorities have signed]
    #[arg(long, value_name = "NAME", requires = "transfer_cert")]
    transfer_name: Option<String>,
}

impl TransferCertificateArgs {
    /// Reads the files, if they are given.
    pub fn read_files(&self) -> Result<Option<PemCertificates>> {
        let (Some(cert), Some(key), Some(ca)) = (&self.transfer_cert, &self.transfer_key, &self.transfer_ca)
        else {
            return Ok(None);
        };
        let read =
            |path: &Path| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
        let name = self.transfer_name.clone();
        Ok(Some(PemCertificates { cert: read(cert)?, key: read(key)?, ca: read(ca)?, name }))
    }
}
