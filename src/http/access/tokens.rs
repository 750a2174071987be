//! The tokens of the HTTP port. Their names, roles and hashes are in a file, which is read again whenever it
//! changes.
//!
//! `wrong_token_throttle.rs` limits wrong tokens. A token is 256 random bits, so no client finds one by trying,
//! however fast. Therefore its hash is a plain SHA-256. A slow hash protects passwords that people choose; here it
//! would only cost time on every request. The file contains only the hashes, so reading the file reveals no token.
//! Hashes are compared in constant time. Begin at [`TokenFile`], then [`TokenHolder`].

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;

use crate::clock::{Clock, random_bytes};
use crate::file_watch::{FileCheckSchedule, FileStamp};
use crate::service::AccessRole;

/// The prefix of every token, by which secret scanners and people recognize a leaked one.
const PREFIX: &str = "muster_";
/// The maximum number of tokens in a file.
const TOKENS_MAX: usize = 1024;
/// The maximum size of the file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
const NAME_BYTES_MAX: usize = 64;

/// The SHA-256 of a token or of another secret.
pub(super) type SecretHash = [u8; 32];

/// Returns the hash of a secret.
pub(super) fn hash_secret(secret: &str) -> SecretHash {
    let mut hash = SecretHash::default();
    hash.copy_from_slice(digest(&SHA256, secret.as_bytes()).as_ref());
    hash
}

/// Returns a random secret of 256 bits.
pub(super) fn random_secret() -> String {
    URL_SAFE_NO_PAD.encode(random_bytes::<32>())
}

/// An error of reading, checking or writing the token file.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file cannot be read or written.
    #[error("the file of tokens {}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        error: io::Error,
    },
    /// The content of the file is invalid.
    #[error("the file of tokens {}: {wrong}; `muster token new` writes it", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The reason.
        wrong: String,
    },
}

/// One line of the token file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenEntry {
    name: String,
    role: AccessRole,
    sha256: String,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenFileContent {
    #[serde(default)]
    token: Vec<TokenEntry>,
}

/// The holder of a token: name, role and hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TokenHolder {
    pub name: Arc<str>,
    pub role: AccessRole,
    pub hash: SecretHash,
}

struct LoadedTokens {
    holders: Arc<[TokenHolder]>,
    stamp: FileStamp,
}

/// The tokens of a file that is reloaded when it changes.
pub struct TokenFile {
    path: PathBuf,
    watch: FileCheckSchedule,
    current: Mutex<LoadedTokens>,
}

impl TokenFile {
    /// Reads the token file at `path`.
    ///
    /// # Errors
    /// If the file cannot be read or its content is invalid.
    pub fn load(path: &Path, clock: Clock) -> Result<Self, TokenError> {
        let stamp = FileStamp::of_file(path);
        let holders = read_token_file(path)?;
        if holders.is_empty() {
            tracing::warn!(file = %path.display(), "there is no token in the file: nobody gets in over HTTP");
        }
        let current = Mutex::new(LoadedTokens { holders: holders.into(), stamp });
        Ok(Self { path: path.into(), watch: FileCheckSchedule::new(clock), current })
    }

    fn lock_loaded(&self) -> std::sync::MutexGuard<'_, LoadedTokens> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the tokens of the last valid read.
    fn current_holders(&self) -> Arc<[TokenHolder]> {
        Arc::clone(&self.lock_loaded().holders)
    }

    /// Reloads the file if it has changed; it checks at intervals.
    pub(super) async fn reload_if_changed(self: &Arc<Self>) {
        let own = Arc::clone(self);
        let look = move || {
            let stamp = FileStamp::of_file(&own.path);
            let changed = own.lock_loaded().stamp != stamp;
            if changed {
                own.reload();
            }
        };
        self.watch.run_check_if_due(look).await;
    }

    /// Reloads the file now, whether it has changed or not. If the new content is invalid, the former tokens
    /// stay.
    pub fn reload(&self) {
        // The stamp is taken before the read, so a change during the read causes another read.
        let stamp = FileStamp::of_file(&self.path);
        let found = read_token_file(&self.path);
        let mut current = self.lock_loaded();
        current.stamp = stamp;
        match found {
            Ok(holders) => {
                tracing::info!(tokens = holders.len(), "the tokens were read again");
                current.holders = holders.into();
            }
            Err(error) => tracing::error!(%error, "the tokens have changed; the former ones stay in use"),
        }
    }

    /// Returns the holder of a token.
    pub(super) fn holder_of_token(&self, token: &str) -> Option<TokenHolder> {
        self.holder_with_hash(&hash_secret(token))
    }

    /// Returns the holder of the token with this hash. All hashes are compared, so the time reveals nothing.
    pub(super) fn holder_with_hash(&self, hash: &SecretHash) -> Option<TokenHolder> {
        let current_holders = self.current_holders();
        let mut found = None;
        for holder in current_holders.iter() {
            if bool::from(holder.hash.ct_eq(hash)) {
                found = Some(holder);
            }
        }
        found.cloned()
    }
}

fn read_token_file(path: &Path) -> Result<Vec<TokenHolder>, TokenError> {
    let failed = |error| TokenError::File { path: path.into(), error };
    let wrong = |wrong: String| TokenError::Content { path: path.into(), wrong };
    if std::fs::metadata(path).map_err(failed)?.len() > FILE_BYTES_MAX {
        return Err(wrong("it is far too long".into()));
    }
    if let Some(better) = crate::file_permissions::check_private_file_permissions(path).map_err(wrong)? {
        tracing::warn!(file = %path.display(), "the file of tokens: {better}");
    }
    let text = std::fs::read_to_string(path).map_err(failed)?;
    parse_token_file(&text).map_err(wrong)
}

/// Returns the tokens that a file's text tells of, or what is wrong with it.
fn parse_token_file(text: &str) -> Result<Vec<TokenHolder>, String> {
    let lines: TokenFileContent = toml::from_str(text).map_err(|error| error.message().to_owned())?;
    if lines.token.len() > TOKENS_MAX {
        return Err(format!("it has more than {TOKENS_MAX} tokens"));
    }
    let mut holders: Vec<TokenHolder> = Vec::with_capacity(lines.token.len());
    for TokenEntry { name, role, sha256 } in lines.token {
        check_holder_name(&name)?;
        let hash = decode_hex(&sha256).ok_or_else(|| format!("the sha256 of {name:?} is none"))?;
        if holders.iter().any(|other| *other.name == *name || other.hash == hash) {
            return Err(format!("{name:?} stands there twice, or its token does"));
        }
        holders.push(TokenHolder { name: name.into(), role, hash });
    }
    Ok(holders)
}

fn check_holder_name(name: &str) -> Result<(), &'static str> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(fits) {
        return Err("a name has 1 to 64 letters, digits and any of - _ . @");
    }
    // The audit uses `anonymous` for actors without a name.
    if name == crate::coordination::Actor::ANONYMOUS { Err("nobody is named anonymous") } else { Ok(()) }
}

fn decode_hex(text: &str) -> Option<SecretHash> {
    let mut hash = SecretHash::default();
    if text.len() != hash.len() * 2 || !text.is_ascii() {
        return None;
    }
    for (byte, pair) in hash.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(hash)
}

/// The property of token files: the lines written for the tokens that were read give the same tokens.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_token_file_round_trip(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    let Ok(holders) = parse_token_file(text) else { return };
    assert!(holders.len() <= TOKENS_MAX);
    let lines: String =
        holders.iter().map(|TokenHolder { name, role, hash }| token_entry_text(name, *role, hash)).collect();
    assert_eq!(parse_token_file(&lines), Ok(holders));
}

/// Returns what stands in the file for a token.
fn token_entry_text(name: &str, role: AccessRole, hash: &SecretHash) -> String {
    let sha256: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("[[token]]\nname = \"{name}\"\nrole = \"{role}\"\nsha256 = \"{sha256}\"\n")
}

/// A token that was just made.
pub struct NewToken {
    /// The token itself, which is shown once and stored nowhere.
    pub token: String,
    /// Its line for the token file.
    pub line: String,
}

impl NewToken {
    /// Generates a token.
    ///
    /// # Errors
    /// If the name is invalid.
    pub fn generate(name: &str, role: AccessRole) -> Result<Self, &'static str> {
        check_holder_name(name)?;
        let token = format!("{PREFIX}{}", random_secret());
        let line = token_entry_text(name, role, &hash_secret(&token));
        Ok(Self { token, line })
    }
}

/// Appends a line to the file at `path`. Creates the file, readable by its owner alone, if it does not exist.
///
/// # Errors
/// If the file cannot be written or would be invalid with this line.
pub fn append_token_to_file(path: &Path, name: &str, line: &str) -> Result<(), TokenError> {
    let failed = |error| TokenError::File { path: path.into(), error };
    let before = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(failed(error)),
    };
    if !before.is_empty() && read_token_file(path)?.iter().any(|holder| &*holder.name == name) {
        let wrong =
            format!("there is a token named {name:?}: take that one out first, or choose another name");
        return Err(TokenError::Content { path: path.into(), wrong });
    }
    let gap = if before.is_empty() { "" } else { "\n" };
    let mut file = File::options().create(true).append(true).mode(0o600).open(path).map_err(failed)?;
    file.write_all(format!("{gap}{line}").as_bytes()).and_then(|()| file.sync_all()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_token_is_known_by_its_hash_alone() {
        let path = std::env::temp_dir().join(format!("muster-tokens-{}.toml", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let ci = NewToken::generate("ci", AccessRole::Operator).unwrap();
        let ops = NewToken::generate("ops", AccessRole::Admin).unwrap();
        append_token_to_file(&path, "ci", &ci.line).unwrap();
        append_token_to_file(&path, "ops", &ops.line).unwrap();
        assert!(
            append_token_to_file(&path, "ci", &ci.line).unwrap_err().to_string().contains("there is a token")
        );
        assert!(!std::fs::read_to_string(&path).unwrap().contains(&ci.token));
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let tokens = TokenFile::load(&path, Clock::start()).unwrap();
        let holder = tokens.holder_of_token(&ci.token).unwrap();
        assert_eq!((&*holder.name, holder.role), ("ci", AccessRole::Operator));
        assert_eq!(tokens.holder_of_token(&format!("{}x", ci.token)), None);
        std::fs::write(&path, "[[token]]\nname = \"a\"\nrole = \"king\"\nsha256 = \"\"\n").unwrap();
        assert!(TokenFile::load(&path, Clock::start()).is_err());
        std::fs::remove_file(&path).unwrap();
        assert!(
            NewToken::generate("a b", AccessRole::Viewer).is_err()
                && NewToken::generate("", AccessRole::Viewer).is_err()
        );
    }
}
