//! The handshake of two engines on a fresh socket: who they are, whether they may connect, and on what terms.
//!
//! | message | from | holds |
//! | --- | --- | --- |
//! | opening | dialler | the version, a nonce |
//! | challenge | acceptor | the version, a nonce |
//! | hello | dialler | both identities, the terms, the dialler's proof |
//! | answer | acceptor | the verdict, the acceptor's proof |
//! | confirmation | dialler | a second proof: the dialler has accepted the answer |
//!
//! All messages have a fixed length, end with a checksum, and are read with one time limit for all of them.
//!
//! With a cluster token a proof is an HMAC of the sender's role and of every message so far, both nonces and both
//! identities included. The dialler proves first. Until its proof is verified, an acceptor has sent its version, a nonce
//! and at most the refusal, which is the same for every dialler: nothing that depends on the token or on its identity.
//! A proof cannot be played back, because the other side's nonce is new for each handshake, and cannot be reflected,
//! because roles and identities differ. A refusal other than that one carries a proof too, so that nobody else can make
//! a dialler give up on its peer.
//!
//! What remains, as with every symmetric secret: a process that a dialler takes for its peer (it holds the peer's address,
//! or can write the peer's entry) receives a proof, and can test guesses of the token against it without further contact.
//! Each guess costs [`ITERATIONS`] hashes; a token of 128 random bits cannot be guessed. And a process between two engines
//! can pass their handshake on and then read and change what follows: TLS is what prevents that.
//!
//! Without a token on either side the proofs are empty.

use std::io::{Read, Write};
use std::num::NonZeroU32;

use subtle::ConstantTimeEq as _;

use crate::base::identity::{Incarnation, Member, TaskId};
use crate::protocol::frame::{crc, u32_at, u64_at};

const MAGIC: &[u8; 7] = b"MUSTERX";
/// The version of this handshake, as it stands after [`MAGIC`].
const VERSION: u8 = b'3';
/// An opening or a challenge: magic, version, which of the two it is, the nonce, a checksum.
const NONCE_MESSAGE: usize = 48;
const NONCE: usize = 32;
const OPENING: u8 = 1;
const CHALLENGE: u8 = 2;
/// A hello or an answer without its proof and its checksum.
const HELLO_TERMS: usize = 56;
const ANSWER_TERMS: usize = 24;
const PROOF: usize = 32;
const CHECKSUM: usize = 4;
const HELLO: usize = HELLO_TERMS + PROOF + CHECKSUM;
const ANSWER: usize = ANSWER_TERMS + PROOF + CHECKSUM;
const CONFIRMATION: usize = PROOF + CHECKSUM;
/// How an alert of TLS begins, and how long it is.
const ALERT: ([u8; 2], usize) = ([21, 3], 7);

/// How many hashes the key is made with: what one guess of a token costs.
const ITERATIONS: NonZeroU32 = NonZeroU32::new(100_000).expect("it is not zero");

/// The roles in a handshake, as proofs name them. All have one length, so that no two inputs of a proof can be equal.
const DIALLER: &[u8; 9] = b"dialler 3";
const ACCEPTOR: &[u8; 9] = b"accepts 3";
const CONFIRMS: &[u8; 9] = b"confirm 3";

/// A nonce, drawn for one handshake.
pub type Nonce = [u8; NONCE];

/// The key that a cluster token gives.
pub struct Key(ring::hmac::Key);

impl Key {
    /// Takes some milliseconds, on purpose.
    pub fn new(token: &[u8]) -> Self {
        let mut derived = [0; 32];
        let algorithm = ring::pbkdf2::PBKDF2_HMAC_SHA256;
        ring::pbkdf2::derive(algorithm, ITERATIONS, b"muster transfer token", token, &mut derived);
        Self(ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &derived))
    }
}

/// What the dialler says of itself and of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// Who dials.
    pub from: Member,
    /// Who is meant.
    pub to: Member,
    /// Tells the connection from others between the two.
    pub nonce: u64,
    /// The number of this lane.
    pub lane: u16,
    /// Whether control frames go here.
    pub control: bool,
    /// Whether a connection is begun (else a lane joins one that is there).
    pub begins: bool,
    /// Whether the receiver should fetch.
    pub fetch: bool,
    /// Whether the dialler wants checksums. Chunks carry them if either side does.
    pub checks: bool,
    /// Bytes of a chunk.
    pub chunk: u32,
    /// The last control frame that the dialler has heard.
    pub heard: u32,
    /// Where a word of the dialler's memory lies that says its incarnation: whoever can read it there can fetch from it.
    pub probe: u64,
}

/// What the acceptor answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Whether it goes on.
    pub verdict: Verdict,
    /// The last control frame that the acceptor has heard.
    pub heard: u32,
    /// As in the hello.
    pub probe: u64,
    /// Whether the acceptor wants checksums.
    pub checks: bool,
}

/// Whether a hello is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is.
    Welcome,
    /// The one who is meant has another life now.
    NotMe(Option<Incarnation>),
    /// The dialler's life is not the one that counts.
    NotYou(Option<Incarnation>),
    /// The answerer is dialling as well, and its connection counts.
    Busy,
    /// The token is missing, or should not be there, or is another.
    Token,
    /// The lane belongs to no connection.
    NoSuchLink,
    /// Too many connections.
    Full,
}

/// Why two engines did not meet.
#[derive(Debug, thiserror::Error)]
pub enum HelloError {
    /// The socket failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The wire is not safe, or failed.
    #[error(transparent)]
    Wire(#[from] crate::io::wire::WireError),
    /// Whoever is there speaks TLS only.
    #[error("it speaks TLS only, and this engine has no certificates: give every engine some, or none")]
    Secured,
    /// What came is no hello.
    #[error("whoever is there speaks another protocol")]
    Protocol,
    /// The other side has another version of this program.
    #[error(
        "it speaks version {} of the handshake and this engine version {}: run the same program everywhere",
        char::from(*.0), char::from(VERSION)
    )]
    Version(u8),
    /// The dialler has not proven that it knows the token.
    #[error("the dialler does not know the cluster token")]
    Unproven,
    /// It was refused.
    #[error("{}", refusal(*.0))]
    Refused(Verdict),
    /// The answerer does not know the token.
    #[error("whoever is there does not know the cluster token")]
    Impostor,
}

fn refusal(verdict: Verdict) -> String {
    let now = |current: Option<Incarnation>| {
        current.map_or_else(String::new, |now| format!(": the incarnation that counts is {now}"))
    };
    match verdict {
        Verdict::Welcome => "accepted".to_owned(),
        Verdict::NotMe(current) => format!("the task has been restarted{}", now(current)),
        Verdict::NotYou(current) => format!("this task's incarnation does not count there{}", now(current)),
        Verdict::Busy => "it is dialling as well".to_owned(),
        Verdict::Token => "the cluster tokens differ: give every engine the same one, or none".to_owned(),
        Verdict::NoSuchLink => "the connection is not known there any more".to_owned(),
        Verdict::Full => "it has as many connections as it takes".to_owned(),
    }
}

/// Puts the checksum of what is before it at the end.
fn seal(bytes: &mut [u8]) {
    if let Some((said, checksum)) = bytes.split_last_chunk_mut::<CHECKSUM>() {
        *checksum = crc(said).to_le_bytes();
    }
}

/// Whether the checksum at the end is right.
fn is_sealed(bytes: &[u8]) -> bool {
    bytes.split_last_chunk::<CHECKSUM>().is_some_and(|(said, checksum)| *checksum == crc(said).to_le_bytes())
}

/// Makes an opening or a challenge.
fn write_nonce(which: u8, nonce: &Nonce) -> [u8; NONCE_MESSAGE] {
    let mut bytes = [0; NONCE_MESSAGE];
    bytes[0..7].copy_from_slice(MAGIC);
    bytes[7] = VERSION;
    bytes[8] = which;
    bytes[12..44].copy_from_slice(nonce);
    seal(&mut bytes);
    bytes
}

/// Whether this is an opening or a challenge.
fn check_nonce(which: u8, bytes: &[u8; NONCE_MESSAGE]) -> Result<(), HelloError> {
    if bytes[0..7] != MAGIC[..] {
        return Err(HelloError::Protocol);
    }
    if bytes[7] != VERSION {
        return Err(if bytes[7].is_ascii_digit() {
            HelloError::Version(bytes[7])
        } else {
            HelloError::Protocol
        });
    }
    if bytes[8] != which || !is_sealed(bytes) {
        return Err(HelloError::Protocol);
    }
    Ok(())
}

impl Hello {
    /// What is said, before its proof. `token` says whether there is one.
    fn terms(&self, token: bool) -> [u8; HELLO_TERMS] {
        let mut bytes = [0; HELLO_TERMS];
        bytes[0..4].copy_from_slice(&self.from.task.0.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.from.incarnation.get().to_le_bytes());
        bytes[12..16].copy_from_slice(&self.to.task.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.to.incarnation.get().to_le_bytes());
        bytes[24..32].copy_from_slice(&self.nonce.to_le_bytes());
        bytes[32..34].copy_from_slice(&self.lane.to_le_bytes());
        let flags = [self.control, self.begins, self.fetch, self.checks, token];
        bytes[34] = flags.iter().enumerate().fold(0, |bits, (at, set)| bits | u8::from(*set) << at);
        bytes[36..40].copy_from_slice(&self.chunk.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.heard.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.probe.to_le_bytes());
        bytes
    }

    /// What is said, and whether the dialler has a token.
    fn read(bytes: &[u8]) -> Option<(Self, bool)> {
        let member = |task, incarnation| {
            let incarnation = Incarnation::new(u64_at(bytes, incarnation))?;
            Some(Member { task: TaskId(u32_at(bytes, task)), incarnation })
        };
        let flag = |at: u8| bytes[34] >> at & 1 != 0;
        let hello = Self {
            from: member(0, 4)?,
            to: member(12, 16)?,
            nonce: u64_at(bytes, 24),
            lane: u16::from_le_bytes([bytes[32], bytes[33]]),
            control: flag(0),
            begins: flag(1),
            fetch: flag(2),
            checks: flag(3),
            chunk: u32_at(bytes, 36),
            heard: u32_at(bytes, 40),
            probe: u64_at(bytes, 48),
        };
        Some((hello, flag(4)))
    }
}

impl Answer {
    /// The refusal of a dialler that has proven nothing: the same for all of them.
    const UNPROVEN: Self = Self { verdict: Verdict::Token, heard: 0, probe: 0, checks: false };

    fn terms(&self) -> [u8; ANSWER_TERMS] {
        let (code, detail) = match self.verdict {
            Verdict::Welcome => (0, 0),
            Verdict::NotMe(now) => (1, now.map_or(0, Incarnation::get)),
            Verdict::NotYou(now) => (2, now.map_or(0, Incarnation::get)),
            Verdict::Busy => (3, 0),
            Verdict::Token => (4, 0),
            Verdict::NoSuchLink => (5, 0),
            Verdict::Full => (6, 0),
        };
        let mut bytes = [0; ANSWER_TERMS];
        bytes[0] = code;
        bytes[1] = u8::from(self.checks);
        bytes[4..8].copy_from_slice(&self.heard.to_le_bytes());
        bytes[8..16].copy_from_slice(&detail.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.probe.to_le_bytes());
        bytes
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let detail = Incarnation::new(u64_at(bytes, 8));
        let verdict = match bytes[0] {
            0 => Verdict::Welcome,
            1 => Verdict::NotMe(detail),
            2 => Verdict::NotYou(detail),
            3 => Verdict::Busy,
            4 => Verdict::Token,
            5 => Verdict::NoSuchLink,
            6 => Verdict::Full,
            _ => return None,
        };
        Some(Self { verdict, heard: u32_at(bytes, 4), probe: u64_at(bytes, 16), checks: bytes[1] != 0 })
    }
}

/// Every message of a handshake so far, without checksums, as proofs cover them.
struct Transcript<'a> {
    key: Option<&'a Key>,
    said: Vec<u8>,
}

impl<'a> Transcript<'a> {
    fn new(key: Option<&'a Key>, opening: &[u8], challenge: &[u8]) -> Self {
        Self { key, said: [opening, challenge].concat() }
    }

    /// The proof of a role that says this now.
    fn prove(&mut self, role: &[u8], terms: &[u8]) -> [u8; PROOF] {
        self.said.extend_from_slice(terms);
        let mut proof = [0; PROOF];
        if let Some(Key(key)) = self.key {
            let mut context = ring::hmac::Context::with_key(key);
            context.update(role);
            context.update(&self.said);
            proof.copy_from_slice(context.sign().as_ref());
        }
        proof
    }

    /// Makes the message of these terms, with its proof.
    fn write<const LENGTH: usize>(&mut self, role: &[u8], terms: &[u8]) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        bytes[..terms.len()].copy_from_slice(terms);
        bytes[terms.len()..terms.len() + PROOF].copy_from_slice(&self.prove(role, terms));
        seal(&mut bytes);
        bytes
    }

    /// Whether the proof of a message is right, without telling by its time where it differs. None if it came damaged.
    fn verify<const LENGTH: usize>(&mut self, role: &[u8], bytes: &[u8; LENGTH]) -> Option<bool> {
        let (terms, proof) = bytes.get(..LENGTH - CHECKSUM)?.split_last_chunk::<PROOF>()?;
        is_sealed(bytes).then(|| self.prove(role, terms).ct_eq(proof).into())
    }
}

/// Dials on a socket that is connected and has time limits.
pub fn dial(
    socket: &mut (impl Read + Write),
    hello: &Hello,
    key: Option<&Key>,
    nonce: &Nonce,
) -> Result<Answer, HelloError> {
    let opening = write_nonce(OPENING, nonce);
    socket.write_all(&opening)?;
    let mut challenge = [0; NONCE_MESSAGE];
    // As much as an alert of TLS has, which is all that comes from whoever expects a handshake.
    let (head, rest) = challenge.split_at_mut(ALERT.1);
    socket.read_exact(head)?;
    if head.starts_with(&ALERT.0) {
        return Err(HelloError::Secured);
    }
    socket.read_exact(rest)?;
    check_nonce(CHALLENGE, &challenge)?;
    let mut transcript = Transcript::new(key, &opening, &challenge);
    socket.write_all(&transcript.write::<HELLO>(DIALLER, &hello.terms(key.is_some())))?;
    let mut bytes = [0; ANSWER];
    socket.read_exact(&mut bytes)?;
    let proven = transcript.verify(ACCEPTOR, &bytes).ok_or(HelloError::Protocol)?;
    let answer = Answer::read(&bytes).ok_or(HelloError::Protocol)?;
    match answer.verdict {
        // Nothing can prove it: the tokens differ.
        Verdict::Token => return Err(HelloError::Refused(Verdict::Token)),
        _ if !proven => return Err(HelloError::Impostor),
        Verdict::Welcome => {}
        refused => return Err(HelloError::Refused(refused)),
    }
    socket.write_all(&transcript.write::<CONFIRMATION>(CONFIRMS, &[]))?;
    Ok(answer)
}

/// A dialler whose proof is right, or that needs none, and that waits for its answer.
pub struct ProvenDialler<'a> {
    /// What it says.
    pub hello: Hello,
    transcript: Transcript<'a>,
}

/// Reads what a dialler says, and verifies its proof.
///
/// # Errors
/// [`HelloError::Unproven`] if it does not know the token: it waits for its [`refuse`]al.
pub fn accept<'a>(
    socket: &mut (impl Read + Write),
    key: Option<&'a Key>,
    nonce: &Nonce,
) -> Result<ProvenDialler<'a>, HelloError> {
    let mut opening = [0; NONCE_MESSAGE];
    socket.read_exact(&mut opening)?;
    let challenge = write_nonce(CHALLENGE, nonce);
    let checked = check_nonce(OPENING, &opening);
    if matches!(checked, Ok(()) | Err(HelloError::Version(_))) {
        socket.write_all(&challenge)?;
    }
    checked?;
    let mut transcript = Transcript::new(key, &opening, &challenge);
    let mut bytes = [0; HELLO];
    socket.read_exact(&mut bytes)?;
    let proven = transcript.verify(DIALLER, &bytes).ok_or(HelloError::Protocol)?;
    let (hello, token) = Hello::read(&bytes).ok_or(HelloError::Protocol)?;
    if !proven || token != key.is_some() {
        return Err(HelloError::Unproven);
    }
    Ok(ProvenDialler { hello, transcript })
}

/// Tells a dialler that it does not know the token.
pub fn refuse(socket: &mut impl Write) -> Result<(), HelloError> {
    let mut bytes = [0; ANSWER];
    bytes[..ANSWER_TERMS].copy_from_slice(&Answer::UNPROVEN.terms());
    seal(&mut bytes);
    Ok(socket.write_all(&bytes)?)
}

impl ProvenDialler<'_> {
    /// Answers, and waits until the dialler has confirmed that it goes on.
    pub fn reply(mut self, socket: &mut (impl Read + Write), answer: &Answer) -> Result<(), HelloError> {
        socket.write_all(&self.transcript.write::<ANSWER>(ACCEPTOR, &answer.terms()))?;
        if answer.verdict != Verdict::Welcome {
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

    fn hello() -> Hello {
        let member = |task, n| Member { task: TaskId(task), incarnation: Incarnation::new(n).unwrap() };
        Hello {
            from: member(0, 1),
            to: member(1, 2),
            nonce: 3,
            lane: 4,
            control: true,
            begins: true,
            fetch: false,
            checks: true,
            chunk: 5,
            heard: 6,
            probe: 7,
        }
    }

    fn answer(verdict: Verdict) -> Answer {
        Answer { verdict, heard: 10, probe: 11, checks: true }
    }

    fn meet(here: Option<&[u8]>, there: Option<&[u8]>, verdict: Verdict) -> [Result<(), String>; 2] {
        let (mut a, mut b) = UnixStream::pair().unwrap();
        let [here, there] = [here, there].map(|token| token.map(Key::new));
        std::thread::scope(|scope| {
            let answering = scope.spawn(move || -> Result<(), HelloError> {
                let heard =
                    accept(&mut b, there.as_ref(), &[9; NONCE]).inspect_err(|_| refuse(&mut b).unwrap())?;
                assert_eq!(heard.hello, hello());
                heard.reply(&mut b, &answer(verdict))
            });
            let dialled = dial(&mut a, &hello(), here.as_ref(), &[8; NONCE])
                .map(|told| assert_eq!(told, answer(Verdict::Welcome)));
            drop(a);
            let answered = answering.join().unwrap();
            [dialled.map_err(|error| error.to_string()), answered.map_err(|error| error.to_string())]
        })
    }

    #[test]
    fn equal_tokens_meet_and_others_do_not() {
        assert_eq!(meet(None, None, Verdict::Welcome), [Ok(()), Ok(())]);
        assert_eq!(meet(Some(b"s"), Some(b"s"), Verdict::Welcome), [Ok(()), Ok(())]);
        for (here, there) in [(None, Some(&b"s"[..])), (Some(&b"s"[..]), None), (Some(b"s"), Some(b"t"))] {
            let [dialled, answered] = meet(here, there, Verdict::Welcome);
            assert!(dialled.unwrap_err().contains("tokens differ"), "{here:?} {there:?}");
            assert!(answered.unwrap_err().contains("does not know"), "{here:?} {there:?}");
        }
    }

    /// Every message of a handshake between engines with these keys, in order.
    fn messages(keys: [Option<&Key>; 2], nonces: [u8; 2]) -> [Vec<u8>; 5] {
        let opening = write_nonce(OPENING, &[nonces[0]; NONCE]);
        let challenge = write_nonce(CHALLENGE, &[nonces[1]; NONCE]);
        let mut transcript = Transcript::new(keys[0], &opening, &challenge);
        let hello = transcript.write::<HELLO>(DIALLER, &hello().terms(keys[0].is_some()));
        transcript.key = keys[1];
        let answer = transcript.write::<ANSWER>(ACCEPTOR, &answer(Verdict::Welcome).terms());
        transcript.key = keys[0];
        let confirmation = transcript.write::<CONFIRMATION>(CONFIRMS, &[]);
        [opening.to_vec(), challenge.to_vec(), hello.to_vec(), answer.to_vec(), confirmation.to_vec()]
    }

    /// Plays one side's messages to the other side, whose nonce is this.
    fn hears(key: Option<&Key>, nonce: u8, said: &[&[u8]]) -> Result<(), HelloError> {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        near.write_all(&said.concat()).unwrap();
        near.shutdown(std::net::Shutdown::Write).unwrap();
        let heard = accept(&mut far, key, &[nonce; NONCE])?;
        heard.reply(&mut far, &answer(Verdict::Welcome))
    }

    fn dials(key: Option<&Key>, nonce: u8, said: &[&[u8]]) -> Result<Answer, HelloError> {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        far.write_all(&said.concat()).unwrap();
        far.shutdown(std::net::Shutdown::Write).unwrap();
        dial(&mut near, &hello(), key, &[nonce; NONCE])
    }

    #[test]
    fn messages_with_any_bit_changed_are_refused() {
        let key = Key::new(b"s");
        for key in [None, Some(&key)] {
            let [opening, challenge, hello, answer, confirmation] = messages([key, key], [8, 9]);
            assert!(hears(key, 9, &[&opening, &hello, &confirmation]).is_ok());
            assert!(dials(key, 8, &[&challenge, &answer]).is_ok());
            let changed = |message: &[u8], bit: usize| {
                let mut message = message.to_vec();
                message[bit / 8] ^= 1 << (bit % 8);
                message
            };
            for bit in 0..8 * NONCE_MESSAGE {
                assert!(hears(key, 9, &[&changed(&opening, bit), &hello, &confirmation]).is_err(), "{bit}");
                assert!(dials(key, 8, &[&changed(&challenge, bit), &answer]).is_err(), "{bit}");
            }
            for bit in 0..8 * HELLO {
                assert!(hears(key, 9, &[&opening, &changed(&hello, bit), &confirmation]).is_err(), "{bit}");
            }
            for bit in 0..8 * ANSWER {
                assert!(dials(key, 8, &[&challenge, &changed(&answer, bit)]).is_err(), "{bit}");
            }
            for bit in 0..8 * CONFIRMATION {
                assert!(hears(key, 9, &[&opening, &hello, &changed(&confirmation, bit)]).is_err(), "{bit}");
            }
        }
    }

    #[test]
    fn a_proof_counts_for_its_role_its_nonces_and_its_token_only() {
        let (key, other) = (Key::new(b"s"), Key::new(b"t"));
        let key = Some(&key);
        let [opening, challenge, hello, answer, confirmation] = messages([key, key], [8, 9]);
        // Played back to another nonce, on either side.
        let unproven = |heard| matches!(heard, Err(HelloError::Unproven));
        assert!(unproven(hears(key, 7, &[&opening, &hello, &confirmation])));
        assert!(matches!(dials(key, 7, &[&challenge, &answer]), Err(HelloError::Impostor)));
        // The proof of one role in the place of another: nothing that a side says is a proof for that side.
        let with_proof = |message: &[u8], of: &[u8]| {
            let mut message = message.to_vec();
            let at = message.len() - PROOF - CHECKSUM;
            let from = of.len() - PROOF - CHECKSUM;
            message[at..at + PROOF].copy_from_slice(&of[from..from + PROOF]);
            seal(&mut message);
            message
        };
        assert!(unproven(hears(key, 9, &[&opening, &with_proof(&hello, &answer), &confirmation])));
        assert!(unproven(hears(key, 9, &[&opening, &hello, &with_proof(&confirmation, &answer)])));
        let reflected = dials(key, 8, &[&challenge, &with_proof(&answer, &hello)]);
        assert!(matches!(reflected, Err(HelloError::Impostor)));
        assert!(matches!(dials(key, 8, &[&opening, &answer]), Err(HelloError::Protocol)), "no challenge");
        // Another token on the side that proves.
        let [opening, challenge, hello, answer, confirmation] = messages([Some(&other); 2], [8, 9]);
        assert!(unproven(hears(key, 9, &[&opening, &hello, &confirmation])));
        assert!(matches!(dials(key, 8, &[&challenge, &answer]), Err(HelloError::Impostor)));
    }

    #[test]
    fn a_dialler_that_proves_nothing_learns_a_version_and_a_nonce() {
        let key = Key::new(b"s");
        for hello in [[0; HELLO].to_vec(), messages([None, None], [8, 9])[2].clone()] {
            let (mut near, mut far) = UnixStream::pair().unwrap();
            near.write_all(&write_nonce(OPENING, &[8; NONCE])).unwrap();
            near.write_all(&hello).unwrap();
            assert!(accept(&mut far, Some(&key), &[9; NONCE]).is_err());
            drop(far);
            let mut told = Vec::new();
            // What it said and nobody read resets the socket.
            let _gone = near.read_to_end(&mut told);
            assert_eq!(told, write_nonce(CHALLENGE, &[9; NONCE]));
        }
        let (mut near, mut far) = UnixStream::pair().unwrap();
        refuse(&mut far).unwrap();
        drop(far);
        let mut told = Vec::new();
        near.read_to_end(&mut told).unwrap();
        assert_eq!(told[0], 4);
        assert!(told[1..ANSWER - CHECKSUM].iter().all(|byte| *byte == 0), "{told:?}");
    }

    #[test]
    fn a_refusal_says_why_and_is_believed_from_the_peer_only() {
        let now = Incarnation::new(77);
        let [dialled, _] = meet(None, None, Verdict::NotMe(now));
        assert!(dialled.unwrap_err().contains("000000000000004d"));
        let (key, other) = (Key::new(b"s"), Key::new(b"t"));
        let [_, challenge, ..] = messages([None, None], [8, 9]);
        for liar in [None, Some(&other)] {
            let mut transcript = Transcript::new(liar, &write_nonce(OPENING, &[8; NONCE]), &challenge);
            transcript.said.extend_from_slice(&hello().terms(true));
            let refusal = transcript.write::<ANSWER>(ACCEPTOR, &answer(Verdict::NotMe(now)).terms());
            let told = dials(Some(&key), 8, &[&challenge, &refusal]);
            assert!(matches!(told, Err(HelloError::Impostor)), "{told:?}");
        }
    }

    #[test]
    fn another_version_is_named() {
        let mut opening = write_nonce(OPENING, &[8; NONCE]);
        opening[7] = b'4';
        seal(&mut opening);
        let told = hears(None, 9, &[&opening]).unwrap_err().to_string();
        assert!(told.contains("version 4") && told.contains("version 3"), "{told}");
        let mut challenge = write_nonce(CHALLENGE, &[9; NONCE]);
        challenge[7] = b'4';
        let told = dials(None, 8, &[&challenge]).unwrap_err().to_string();
        assert!(told.contains("version 4"), "{told}");
    }
}
