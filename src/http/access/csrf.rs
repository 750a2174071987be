//! The proof that a form comes from a page of this server.
//!
//! Every page with a form contains a proof: a value that is derived from a cookie of the browser and a key that only
//! this process has. A page of another server can make the browser send a form with the cookie, and can even set a
//! cookie. But such a page cannot derive the proof. `login.rs` sets the session cookie, and `middleware.rs` sets the
//! cookie of a browser without a session. Begin at `CsrfKey::proof_for_cookie`.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;

use crate::clock::random_bytes;

/// The CSRF proof that the forms of the requested page carry.
#[derive(Debug, Clone)]
pub(in crate::http) struct CsrfProof(pub Arc<str>);

/// The HMAC key from which CSRF proofs are derived.
pub(super) struct CsrfKey(hmac::Key);

impl CsrfKey {
    pub fn new() -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, &random_bytes::<32>()))
    }

    /// Returns the proof for a cookie.
    pub fn proof_for_cookie(&self, cookie: &str) -> Arc<str> {
        URL_SAFE_NO_PAD.encode(hmac::sign(&self.0, cookie.as_bytes())).into()
    }

    /// Returns whether `shown` is the proof for the cookie. The comparison takes constant time.
    pub fn verifies_proof(&self, cookie: &str, shown: &str) -> bool {
        let Ok(shown) = URL_SAFE_NO_PAD.decode(shown) else { return false };
        hmac::verify(&self.0, cookie.as_bytes(), &shown).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_cookie_and_in_its_process_only() {
        let (here, elsewhere) = (CsrfKey::new(), CsrfKey::new());
        let proof = here.proof_for_cookie("a");
        assert!(here.verifies_proof("a", &proof));
        assert!(
            !here.verifies_proof("b", &proof)
                && !elsewhere.verifies_proof("a", &proof)
                && !here.verifies_proof("a", "")
        );
    }
}
