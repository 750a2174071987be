//! The proofs of a handshake. By a proof, a side shows that it has the cluster token.
//!
//! [`hello`](super::hello) has the messages that carry the proofs. Begin at [`HandshakeTranscript`].

use std::num::NonZeroU32;

use subtle::ConstantTimeEq as _;

use super::hello::{CHECKSUM, PROOF, is_checksum_valid, write_checksum};

/// The number of PBKDF2 iterations of the key, which is the cost of one guess of a token.
const ITERATIONS: NonZeroU32 = NonZeroU32::new(100_000).expect("it is not zero");

/// The roles of a handshake, as proofs name them. All have one length, so that no two inputs of a proof can
/// be equal.
pub const DIALLER: &[u8; 9] = b"dialler 3";
/// The acceptor's role; see [`DIALLER`].
pub const ACCEPTOR: &[u8; 9] = b"accepts 3";
/// The dialler's role in its confirmation; see [`DIALLER`].
pub const CONFIRMS: &[u8; 9] = b"confirm 3";

/// The key that is derived from a cluster token.
pub struct TokenKey(ring::hmac::Key);

impl TokenKey {
    /// Derives the key of a token. It takes some milliseconds, on purpose.
    pub fn new(token: &[u8]) -> Self {
        let mut derived = [0; 32];
        let algorithm = ring::pbkdf2::PBKDF2_HMAC_SHA256;
        ring::pbkdf2::derive(algorithm, ITERATIONS, b"muster transfer token", token, &mut derived);
        Self(ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &derived))
    }
}

/// The messages of a handshake so far, without checksums, as proofs cover them.
pub struct HandshakeTranscript<'a> {
    /// The key of this side.
    pub key: Option<&'a TokenKey>,
    /// The messages so far.
    pub said: Vec<u8>,
}

impl<'a> HandshakeTranscript<'a> {
    /// Begins with an opening and a challenge.
    pub fn from_opening(key: Option<&'a TokenKey>, opening: &[u8], challenge: &[u8]) -> Self {
        Self { key, said: [opening, challenge].concat() }
    }

    /// Appends `terms` and returns the proof of `role` for all messages so far.
    pub fn prove(&mut self, role: &[u8], terms: &[u8]) -> [u8; PROOF] {
        self.said.extend_from_slice(terms);
        let mut proof = [0; PROOF];
        if let Some(TokenKey(key)) = self.key {
            let mut context = ring::hmac::Context::with_key(key);
            context.update(role);
            context.update(&self.said);
            proof.copy_from_slice(context.sign().as_ref());
        }
        proof
    }

    /// Encodes the message of these terms, with its proof.
    pub fn encode_with_proof<const LENGTH: usize>(&mut self, role: &[u8], terms: &[u8]) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        bytes[..terms.len()].copy_from_slice(terms);
        bytes[terms.len()..terms.len() + PROOF].copy_from_slice(&self.prove(role, terms));
        write_checksum(&mut bytes);
        bytes
    }

    /// Returns whether the proof of a message is right, in constant time. None if the checksum of the message
    /// is wrong.
    pub fn verify<const LENGTH: usize>(&mut self, role: &[u8], bytes: &[u8; LENGTH]) -> Option<bool> {
        let (terms, proof) = bytes.get(..LENGTH - CHECKSUM)?.split_last_chunk::<PROOF>()?;
        is_checksum_valid(bytes).then(|| self.prove(role, terms).ct_eq(proof).into())
    }
}
