//! Decides which processes may connect to a task's transfer engine: those that have the shared secret, those that
//! have a certificate, or all.
//!
//! The engine opens the sockets. Begin at [`TransferAccess::apply_to_config`].

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::config::AgentConfig;
use super::error::AgentError;
use crate::transfer::PemCertificates;

/// The maximum length of a secret file, in bytes.
const SECRET_BYTES_MAX: u64 = 64 << 10;
/// The minimum strength of a secret, in bits.
const SECRET_BITS: usize = 128;

/// The credentials that the engines of a job require of one another.
#[derive(Debug, Clone, Default)]
pub struct TransferAccess {
    /// A file with the secret that all engines share.
    pub token_file: Option<PathBuf>,
    /// The certificates with which transfers over TCP are encrypted.
    pub certificates: Option<PemCertificates>,
    /// Whether an engine may be reachable from other hosts without either.
    pub is_insecure: bool,
}

impl TransferAccess {
    /// Sets the access in `config`, whose `listen` is set.
    ///
    /// # Errors
    /// If the secret cannot be read, or other hosts could reach the engine and nothing would ask who they are.
    pub fn apply_to_config(self, config: &mut AgentConfig) -> Result<(), AgentError> {
        config.token = self.token_file.as_deref().map(read_secret).transpose()?;
        config.transfer_tls = self.certificates;
        check_credentials_if_exposed(config, self.is_insecure)
    }
}

/// Checks that an engine that other hosts can reach asks them who they are.
///
/// # Errors
/// If it would not, and is not allowed to be insecure.
pub fn check_credentials_if_exposed(config: &AgentConfig, is_insecure: bool) -> Result<(), AgentError> {
    let has_proof = config.token.is_some() || config.transfer_tls.is_some();
    match config.listen {
        Some(address) if !address.ip().is_loopback() && !has_proof && !is_insecure => {
            Err(AgentError::Settings(format!(
                "--listen {address} can be reached by other machines, and nothing would ask who they are: give all workers \
                 one secret (--token-file) or certificates (--transfer-cert, --transfer-key and --transfer-ca), or allow it \
                 (--insecure-transfers) inside a network that you trust"
            )))
        }
        _ => Ok(()),
    }
}

/// Reads the shared secret in a file.
fn read_secret(path: &Path) -> Result<Vec<u8>, AgentError> {
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(SECRET_BYTES_MAX + 1).read_to_end(&mut text));
    let wrong = AgentError::Settings;
    read.map_err(|error| wrong(format!("cannot read the secret in {}: {error}", path.display())))?;
    if text.len() as u64 > SECRET_BYTES_MAX {
        let text = format!("{} holds more than {SECRET_BYTES_MAX} bytes: is it the secret?", path.display());
        return Err(wrong(text));
    }
    let secret = text.trim_ascii();
    if secret.is_empty() {
        let text = format!("{} holds no secret: put at least 16 random bytes into it", path.display());
        return Err(wrong(text));
    }
    let bits = max_entropy_bits(secret);
    if bits < SECRET_BITS {
        tracing::warn!(
            "the secret in {} holds {bits} bits at most: a process that a worker takes for its peer can \
             find it by guessing, without asking anybody. Make one with: head -c 32 /dev/urandom | base64",
            path.display()
        );
    }
    Ok(secret.to_vec())
}

/// Returns the maximum entropy of a text of this length and alphabet, in bits.
fn max_entropy_bits(secret: &[u8]) -> usize {
    let each = if secret.iter().all(u8::is_ascii_hexdigit) {
        4
    } else if secret.iter().all(u8::is_ascii_graphic) {
        6
    } else {
        8
    };
    secret.len() * each
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_holds_as_much_as_its_alphabet_allows() {
        for (secret, bits) in
            [("0123456789abcdef0123456789abcdef", 128), ("hunter2", 42), ("AAECAwQF+/8=", 72)]
        {
            assert_eq!(max_entropy_bits(secret.as_bytes()), bits, "{secret}");
        }
        assert_eq!(max_entropy_bits(&[0xff; 16]), 128);
    }
}
