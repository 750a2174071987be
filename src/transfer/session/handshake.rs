//! Performs the handshake on a new wire, for the dialler and for the acceptor.
//!
//! [`crate::protocol::hello`] has the messages, and the reasons why they are safe. The handshake does not depend on
//! connections. Begin at [`perform_dialler_handshake`] and [`receive_proven_hello`].

use std::io::{Read, Write};

use crate::io::wire::WireError;
use crate::protocol::hello::{
    ANSWER, ANSWER_TERMS, CHALLENGE, CONFIRMATION, HELLO, Hello, HelloAnswer, HelloVerdict, NONCE_MESSAGE,
    Nonce, NonceError, OPENING, VERSION, check_nonce_message, encode_nonce_message, refusal_text,
    write_checksum,
};
use crate::protocol::proof::{ACCEPTOR, CONFIRMS, DIALLER, HandshakeTranscript, TokenKey};

/// The first bytes of a TLS alert record, and its length.
const ALERT: ([u8; 2], usize) = ([21, 3], 7);

/// The reason why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HelloError {
    /// The socket failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The wire is not safe, or failed.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The acceptor speaks TLS only.
    #[error("it speaks TLS only, and this engine has no certificates: give every engine some, or none")]
    Secured,
    /// The bytes received are no message of the handshake.
    #[error("the other end speaks another protocol")]
    Protocol,
    /// The other side has another version of the handshake.
    #[error(
        "it speaks version {} of the handshake and this engine version {}: run the same program everywhere",
        char::from(*.0), char::from(VERSION)
    )]
    Version(u8),
    /// The dialler has not proven that it knows the token.
    #[error("the dialler does not know the cluster token")]
    Unproven,
    /// The acceptor refused.
    #[error("{}", refusal_text(*.0))]
    Refused(HelloVerdict),
    /// The acceptor has not proven that it knows the token.
    #[error("the other end does not know the cluster token")]
    Impostor,
}

impl From<NonceError> for HelloError {
    fn from(error: NonceError) -> Self {
        match error {
            NonceError::Protocol => Self::Protocol,
            NonceError::Version(version) => Self::Version(version),
        }
    }
}

/// Performs the dialler's side of the handshake on a connected socket that has time limits. Returns the
/// acceptor's answer.
pub fn perform_dialler_handshake(
    socket: &mut (impl Read + Write),
    hello: &Hello,
    key: Option<&TokenKey>,
    nonce: &Nonce,
) -> Result<HelloAnswer, HelloError> {
    let opening = encode_nonce_message(OPENING, nonce);
    socket.write_all(&opening)?;
    let mut challenge = [0; NONCE_MESSAGE];
    // The first read takes the length of a TLS alert, because a peer that expects a TLS handshake sends no
    // more than that.
    let (head, rest) = challenge.split_at_mut(ALERT.1);
    socket.read_exact(head)?;
    if head.starts_with(&ALERT.0) {
        return Err(HelloError::Secured);
    }
    socket.read_exact(rest)?;
    check_nonce_message(CHALLENGE, &challenge)?;
    let mut transcript = HandshakeTranscript::from_opening(key, &opening, &challenge);
    socket.write_all(
        &transcript.encode_with_proof::<HELLO>(DIALLER, &hello.encode_without_proof(key.is_some())),
    )?;
    let mut bytes = [0; ANSWER];
    socket.read_exact(&mut bytes)?;
    let proven = transcript.verify(ACCEPTOR, &bytes).ok_or(HelloError::Protocol)?;
    let answer = HelloAnswer::decode(&bytes).ok_or(HelloError::Protocol)?;
    match answer.verdict {
        // A refusal for the token carries no proof: the two sides share no token to prove it with.
        HelloVerdict::Token => return Err(HelloError::Refused(HelloVerdict::Token)),
        _ if !proven => return Err(HelloError::Impostor),
        HelloVerdict::Welcome => {}
        refused => return Err(HelloError::Refused(refused)),
    }
    socket.write_all(&transcript.encode_with_proof::<CONFIRMATION>(CONFIRMS, &[]))?;
    Ok(answer)
}

/// A dialler whose proof is valid, or that needs none, and that waits for the answer.
pub struct ProvenDialler<'a> {
    /// Its hello.
    pub hello: Hello,
    transcript: HandshakeTranscript<'a>,
}

/// Reads the messages of a dialler, and verifies its proof.
///
/// # Errors
/// Returns [`HelloError::Unproven`] if the dialler does not know the token; the caller then [`send_unproven_refusal`]s it.
pub fn receive_proven_hello<'a>(
    socket: &mut (impl Read + Write),
    key: Option<&'a TokenKey>,
    nonce: &Nonce,
) -> Result<ProvenDialler<'a>, HelloError> {
    let mut opening = [0; NONCE_MESSAGE];
    socket.read_exact(&mut opening)?;
    let challenge = encode_nonce_message(CHALLENGE, nonce);
    let checked = check_nonce_message(OPENING, &opening);
    if matches!(checked, Ok(()) | Err(NonceError::Version(_))) {
        socket.write_all(&challenge)?;
    }
    checked?;
    let mut transcript = HandshakeTranscript::from_opening(key, &opening, &challenge);
    let mut bytes = [0; HELLO];
    socket.read_exact(&mut bytes)?;
    let proven = transcript.verify(DIALLER, &bytes).ok_or(HelloError::Protocol)?;
    let (hello, token) = Hello::decode(&bytes).ok_or(HelloError::Protocol)?;
    if !proven || token != key.is_some() {
        return Err(HelloError::Unproven);
    }
    Ok(ProvenDialler { hello, transcript })
}

/// Sends a dialler the refusal that says that it does not know the token.
pub fn send_unproven_refusal(socket: &mut impl Write) -> Result<(), HelloError> {
    let mut bytes = [0; ANSWER];
    bytes[..ANSWER_TERMS].copy_from_slice(&HelloAnswer::UNPROVEN.encode_without_proof());
    write_checksum(&mut bytes);
    Ok(socket.write_all(&bytes)?)
}

impl ProvenDialler<'_> {
    /// Sends the answer. If it is a welcome, waits for the dialler's confirmation.
    pub fn send_answer(
        mut self,
        socket: &mut (impl Read + Write),
        answer: &HelloAnswer,
    ) -> Result<(), HelloError> {
        socket.write_all(
            &self.transcript.encode_with_proof::<ANSWER>(ACCEPTOR, &answer.encode_without_proof()),
        )?;
        if answer.verdict != HelloVerdict::Welcome {
            return Err(HelloError::Refused(answer.verdict));
        }
        let mut bytes = [0; CONFIRMATION];
        socket.read_exact(&mut bytes)?;
        match self.transcript.verify(CONFIRMS, &bytes) {
            Some(true) => Ok(()),
            Some(false) => Err(HelloError::Unproven),
            None => Err(HelloError::Protocol),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::base::membership::{Incarnation, MemberId, TaskId};
    use crate::protocol::hello::{CHECKSUM, NONCE, PROOF};

    fn hello() -> Hello {
        let member = |task, n| MemberId::of_own_job(TaskId(task), Incarnation::new(n).unwrap());
        Hello {
            from: member(0, 1),
            to: member(1, 2),
            across_jobs: false,
            nonce: 3,
            lane: 4,
            control: true,
            begins: true,
            fetch: false,
            checks: true,
            chunk: 5,
            heard: 6,
            fabric: 8,
            cliques: true,
            probe: 7,
        }
    }

    fn answer(verdict: HelloVerdict) -> HelloAnswer {
        HelloAnswer { verdict, heard: 10, probe: 11, checks: true, fabric: true, cliques: true }
    }

    fn run_handshake(
        here: Option<&[u8]>,
        there: Option<&[u8]>,
        verdict: HelloVerdict,
    ) -> [Result<(), String>; 2] {
        let (mut a, mut b) = UnixStream::pair().unwrap();
        let [here, there] = [here, there].map(|token| token.map(TokenKey::new));
        std::thread::scope(|scope| {
            let answering = scope.spawn(move || -> Result<(), HelloError> {
                let heard = receive_proven_hello(&mut b, there.as_ref(), &[9; NONCE])
                    .inspect_err(|_| send_unproven_refusal(&mut b).unwrap())?;
                assert_eq!(heard.hello, hello());
                heard.send_answer(&mut b, &answer(verdict))
            });
            let dialled = perform_dialler_handshake(&mut a, &hello(), here.as_ref(), &[8; NONCE])
                .map(|told| assert_eq!(told, answer(HelloVerdict::Welcome)));
            drop(a);
            let answered = answering.join().unwrap();
            [dialled.map_err(|error| error.to_string()), answered.map_err(|error| error.to_string())]
        })
    }

    #[test]
    fn equal_tokens_meet_and_others_do_not() {
        assert_eq!(run_handshake(None, None, HelloVerdict::Welcome), [Ok(()), Ok(())]);
        assert_eq!(run_handshake(Some(b"s"), Some(b"s"), HelloVerdict::Welcome), [Ok(()), Ok(())]);
        for (here, there) in [(None, Some(&b"s"[..])), (Some(&b"s"[..]), None), (Some(b"s"), Some(b"t"))] {
            let [dialled, answered] = run_handshake(here, there, HelloVerdict::Welcome);
            assert!(dialled.unwrap_err().contains("tokens differ"), "{here:?} {there:?}");
            assert!(answered.unwrap_err().contains("does not know"), "{here:?} {there:?}");
        }
    }

    /// Returns every message of a handshake between engines with these keys, in order.
    fn record_handshake_messages(keys: [Option<&TokenKey>; 2], nonces: [u8; 2]) -> [Vec<u8>; 5] {
        let opening = encode_nonce_message(OPENING, &[nonces[0]; NONCE]);
        let challenge = encode_nonce_message(CHALLENGE, &[nonces[1]; NONCE]);
        let mut transcript = HandshakeTranscript::from_opening(keys[0], &opening, &challenge);
        let hello =
            transcript.encode_with_proof::<HELLO>(DIALLER, &hello().encode_without_proof(keys[0].is_some()));
        transcript.key = keys[1];
        let answer = transcript
            .encode_with_proof::<ANSWER>(ACCEPTOR, &answer(HelloVerdict::Welcome).encode_without_proof());
        transcript.key = keys[0];
        let confirmation = transcript.encode_with_proof::<CONFIRMATION>(CONFIRMS, &[]);
        [opening.to_vec(), challenge.to_vec(), hello.to_vec(), answer.to_vec(), confirmation.to_vec()]
    }

    /// Plays the dialler's messages to an acceptor with this nonce.
    fn accept_recorded_messages(key: Option<&TokenKey>, nonce: u8, said: &[&[u8]]) -> Result<(), HelloError> {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        near.write_all(&said.concat()).unwrap();
        near.shutdown(std::net::Shutdown::Write).unwrap();
        let heard = receive_proven_hello(&mut far, key, &[nonce; NONCE])?;
        heard.send_answer(&mut far, &answer(HelloVerdict::Welcome))
    }

    fn dial_recorded_acceptor(
        key: Option<&TokenKey>,
        nonce: u8,
        said: &[&[u8]],
    ) -> Result<HelloAnswer, HelloError> {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        far.write_all(&said.concat()).unwrap();
        far.shutdown(std::net::Shutdown::Write).unwrap();
        perform_dialler_handshake(&mut near, &hello(), key, &[nonce; NONCE])
    }

    #[test]
    fn messages_with_any_bit_changed_are_refused() {
        let key = TokenKey::new(b"s");
        for key in [None, Some(&key)] {
            let [opening, challenge, hello, answer, confirmation] =
                record_handshake_messages([key, key], [8, 9]);
            assert!(accept_recorded_messages(key, 9, &[&opening, &hello, &confirmation]).is_ok());
            assert!(dial_recorded_acceptor(key, 8, &[&challenge, &answer]).is_ok());
            let changed = |message: &[u8], bit: usize| {
                let mut message = message.to_vec();
                message[bit / 8] ^= 1 << (bit % 8);
                message
            };
            for bit in 0..8 * NONCE_MESSAGE {
                assert!(
                    accept_recorded_messages(key, 9, &[&changed(&opening, bit), &hello, &confirmation])
                        .is_err(),
                    "{bit}"
                );
                assert!(
                    dial_recorded_acceptor(key, 8, &[&changed(&challenge, bit), &answer]).is_err(),
                    "{bit}"
                );
            }
            for bit in 0..8 * HELLO {
                assert!(
                    accept_recorded_messages(key, 9, &[&opening, &changed(&hello, bit), &confirmation])
                        .is_err(),
                    "{bit}"
                );
            }
            for bit in 0..8 * ANSWER {
                assert!(
                    dial_recorded_acceptor(key, 8, &[&challenge, &changed(&answer, bit)]).is_err(),
                    "{bit}"
                );
            }
            for bit in 0..8 * CONFIRMATION {
                assert!(
                    accept_recorded_messages(key, 9, &[&opening, &hello, &changed(&confirmation, bit)])
                        .is_err(),
                    "{bit}"
                );
            }
        }
    }

    #[test]
    fn a_proof_counts_for_its_role_its_nonces_and_its_token_only() {
        let (key, other) = (TokenKey::new(b"s"), TokenKey::new(b"t"));
        let key = Some(&key);
        let [opening, challenge, hello, answer, confirmation] = record_handshake_messages([key, key], [8, 9]);
        // Messages replayed against another nonce, on either side.
        let unproven = |heard| matches!(heard, Err(HelloError::Unproven));
        assert!(unproven(accept_recorded_messages(key, 7, &[&opening, &hello, &confirmation])));
        assert!(matches!(dial_recorded_acceptor(key, 7, &[&challenge, &answer]), Err(HelloError::Impostor)));
        // A proof of one role in place of another: a side's own proof must not convince that side.
        let with_proof = |message: &[u8], of: &[u8]| {
            let mut message = message.to_vec();
            let at = message.len() - PROOF - CHECKSUM;
            let from = of.len() - PROOF - CHECKSUM;
            message[at..at + PROOF].copy_from_slice(&of[from..from + PROOF]);
            write_checksum(&mut message);
            message
        };
        assert!(unproven(accept_recorded_messages(
            key,
            9,
            &[&opening, &with_proof(&hello, &answer), &confirmation]
        )));
        assert!(unproven(accept_recorded_messages(
            key,
            9,
            &[&opening, &hello, &with_proof(&confirmation, &answer)]
        )));
        let reflected = dial_recorded_acceptor(key, 8, &[&challenge, &with_proof(&answer, &hello)]);
        assert!(matches!(reflected, Err(HelloError::Impostor)));
        assert!(
            matches!(dial_recorded_acceptor(key, 8, &[&opening, &answer]), Err(HelloError::Protocol)),
            "no challenge"
        );
        // The proving side has another token.
        let [opening, challenge, hello, answer, confirmation] =
            record_handshake_messages([Some(&other); 2], [8, 9]);
        assert!(unproven(accept_recorded_messages(key, 9, &[&opening, &hello, &confirmation])));
        assert!(matches!(dial_recorded_acceptor(key, 8, &[&challenge, &answer]), Err(HelloError::Impostor)));
    }

    #[test]
    fn a_dialler_that_proves_nothing_learns_a_version_and_a_nonce() {
        let key = TokenKey::new(b"s");
        for hello in [[0; HELLO].to_vec(), record_handshake_messages([None, None], [8, 9])[2].clone()] {
            let (mut near, mut far) = UnixStream::pair().unwrap();
            near.write_all(&encode_nonce_message(OPENING, &[8; NONCE])).unwrap();
            near.write_all(&hello).unwrap();
            assert!(receive_proven_hello(&mut far, Some(&key), &[9; NONCE]).is_err());
            drop(far);
            let mut told = Vec::new();
            // The socket is reset because bytes that were sent to it were not read.
            let _gone = near.read_to_end(&mut told);
            assert_eq!(told, encode_nonce_message(CHALLENGE, &[9; NONCE]));
        }
        let (mut near, mut far) = UnixStream::pair().unwrap();
        send_unproven_refusal(&mut far).unwrap();
        drop(far);
        let mut told = Vec::new();
        near.read_to_end(&mut told).unwrap();
        assert_eq!(told[0], 4);
        assert!(told[1..ANSWER - CHECKSUM].iter().all(|byte| *byte == 0), "{told:?}");
    }

    #[test]
    fn a_refusal_says_why_and_is_believed_from_the_peer_only() {
        let now = Incarnation::new(77);
        let [dialled, _] = run_handshake(None, None, HelloVerdict::StaleTarget(now));
        assert!(dialled.unwrap_err().contains("000000000000004d"));
        let (key, other) = (TokenKey::new(b"s"), TokenKey::new(b"t"));
        let [_, challenge, ..] = record_handshake_messages([None, None], [8, 9]);
        for liar in [None, Some(&other)] {
            let mut transcript = HandshakeTranscript::from_opening(
                liar,
                &encode_nonce_message(OPENING, &[8; NONCE]),
                &challenge,
            );
            transcript.said.extend_from_slice(&hello().encode_without_proof(true));
            let refusal = transcript.encode_with_proof::<ANSWER>(
                ACCEPTOR,
                &answer(HelloVerdict::StaleTarget(now)).encode_without_proof(),
            );
            let told = dial_recorded_acceptor(Some(&key), 8, &[&challenge, &refusal]);
            assert!(matches!(told, Err(HelloError::Impostor)), "{told:?}");
        }
    }

    #[test]
    fn another_version_is_named() {
        let mut opening = encode_nonce_message(OPENING, &[8; NONCE]);
        opening[7] = b'4';
        write_checksum(&mut opening);
        let told = accept_recorded_messages(None, 9, &[&opening]).unwrap_err().to_string();
        assert!(told.contains("version 4") && told.contains("version 3"), "{told}");
        let mut challenge = encode_nonce_message(CHALLENGE, &[9; NONCE]);
        challenge[7] = b'4';
        let told = dial_recorded_acceptor(None, 8, &[&challenge]).unwrap_err().to_string();
        assert!(told.contains("version 4"), "{told}");
    }
}
