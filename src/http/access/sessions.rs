//! Holds sessions of browsers by the hash of their id, until they expire.
//!
//! It does not read cookies (`middleware.rs`). Begin at `SessionStore::create`.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::tokens::{Hash, hash, random_secret};
use crate::coordination::Timestamp;

/// The maximum number of sessions. A new one replaces the oldest.
const SESSIONS_MAX: usize = 1024;

struct Session {
    /// The hash of the token of the login: the session ends with its token and has its role.
    token: Hash,
    until: Timestamp,
}

/// The open sessions.
pub(super) struct SessionStore {
    timeout: Duration,
    open: Mutex<HashMap<Hash, Session>>,
}

impl SessionStore {
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, open: Mutex::default() }
    }

    /// Returns the lifetime of a session.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    fn open(&self) -> std::sync::MutexGuard<'_, HashMap<Hash, Session>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session for the holder of a token and returns its id.
    pub fn create(&self, now: Timestamp, token: Hash) -> String {
        let id = random_secret();
        let mut open = self.open();
        open.retain(|_, session| session.until > now);
        if open.len() >= SESSIONS_MAX
            && let Some(oldest) = open.iter().min_by_key(|(_, session)| session.until).map(|(key, _)| *key)
        {
            open.remove(&oldest);
        }
        open.insert(hash(&id), Session { token, until: now.after(self.timeout) });
        id
    }

    /// Returns the hash of the token with which the session was opened.
    pub fn token(&self, now: Timestamp, id: &str) -> Option<Hash> {
        self.open().get(&hash(id)).filter(|session| session.until > now).map(|session| session.token)
    }

    /// Ends a session.
    pub fn end(&self, id: &str) {
        self.open().remove(&hash(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_ends_by_time_by_word_and_for_want_of_room() {
        let sessions = SessionStore::new(Duration::from_secs(10));
        let (start, token) = (Timestamp(1), Hash::default());
        let first = sessions.create(start, token);
        assert_eq!(sessions.token(start, &first), Some(token));
        assert_eq!(sessions.token(start, "x"), None);
        assert_eq!(sessions.token(start.after(Duration::from_secs(10)), &first), None);
        let later = start.after(Duration::from_secs(1));
        let second = sessions.create(later, token);
        sessions.end(&second);
        assert_eq!(sessions.token(later, &second), None);
        for _ in 0..SESSIONS_MAX {
            sessions.create(later, token);
        }
        let count = sessions.open().len();
        assert_eq!((count, sessions.token(later, &first)), (SESSIONS_MAX, None));
    }
}
