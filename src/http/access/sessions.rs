//! Holds the sessions of browsers until they expire, by the hash of the session id.
//!
//! `middleware.rs` reads the cookies. Begin at `SessionStore::create_session`.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::tokens::{SecretHash, hash_secret, random_secret};
use crate::coordination::Timestamp;

/// The maximum number of sessions. A new one replaces the oldest.
const SESSIONS_MAX: usize = 1024;

struct Session {
    /// The hash of the token of the login: the session ends with its token and has its role.
    token: SecretHash,
    until: Timestamp,
}

/// The open sessions.
pub(super) struct SessionStore {
    timeout: Duration,
    open: Mutex<HashMap<SecretHash, Session>>,
}

impl SessionStore {
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, open: Mutex::default() }
    }

    /// Returns the lifetime of a session.
    pub fn session_timeout(&self) -> Duration {
        self.timeout
    }

    fn lock_sessions(&self) -> std::sync::MutexGuard<'_, HashMap<SecretHash, Session>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session for the holder of a token and returns its id.
    pub fn create_session(&self, now: Timestamp, token: SecretHash) -> String {
        let id = random_secret();
        let mut open = self.lock_sessions();
        open.retain(|_, session| session.until > now);
        if open.len() >= SESSIONS_MAX
            && let Some(oldest) = open.iter().min_by_key(|(_, session)| session.until).map(|(key, _)| *key)
        {
            open.remove(&oldest);
        }
        open.insert(hash_secret(&id), Session { token, until: now.after(self.timeout) });
        id
    }

    /// Returns the hash of the token with which the session was opened.
    pub fn login_token_hash_of_session(&self, now: Timestamp, id: &str) -> Option<SecretHash> {
        self.lock_sessions()
            .get(&hash_secret(id))
            .filter(|session| session.until > now)
            .map(|session| session.token)
    }

    /// Ends a session.
    pub fn end_session(&self, id: &str) {
        self.lock_sessions().remove(&hash_secret(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_ends_by_time_by_word_and_for_want_of_room() {
        let sessions = SessionStore::new(Duration::from_secs(10));
        let (start, token) = (Timestamp(1), SecretHash::default());
        let first = sessions.create_session(start, token);
        assert_eq!(sessions.login_token_hash_of_session(start, &first), Some(token));
        assert_eq!(sessions.login_token_hash_of_session(start, "x"), None);
        assert_eq!(sessions.login_token_hash_of_session(start.after(Duration::from_secs(10)), &first), None);
        let later = start.after(Duration::from_secs(1));
        let second = sessions.create_session(later, token);
        sessions.end_session(&second);
        assert_eq!(sessions.login_token_hash_of_session(later, &second), None);
        for _ in 0..SESSIONS_MAX {
            sessions.create_session(later, token);
        }
        let count = sessions.lock_sessions().len();
        assert_eq!((count, sessions.login_token_hash_of_session(later, &first)), (SESSIONS_MAX, None));
    }
}
