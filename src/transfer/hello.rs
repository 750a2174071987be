//! How two engines meet on a fresh socket: who they are, whether they may, and on what terms.
//!
//! Three messages of fixed length: the dialler's hello, the answer, the dialler's confirmation. With a cluster token both
//! sides prove that they know it, over what both have said and both have drawn, so nothing can be played back; without
//! one on either side the proofs are empty. All of it is read with a time limit.

use std::io::{Read, Write};

use subtle::ConstantTimeEq as _;

use super::frame::{crc, u32_at, u64_at};
use super::identity::{Incarnation, Member, TaskId};

const MAGIC: &[u8; 8] = b"MUSTERX2";
/// The last four bytes of both are a checksum of those before: no lane is made by what was damaged on the way.
const HELLO: usize = 84;
const ANSWER: usize = 84;
const CHECKSUM: usize = 4;
const PROOF: usize = 32;
/// How an alert of TLS begins, and how long it is.
const ALERT: ([u8; 2], usize) = ([21, 3], 7);

/// What the dialler says first.
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
    /// Whether the dialler will prove that it knows the token.
    pub token: bool,
    /// Where a word of the dialler's memory lies that says `nonce`: whoever can read it there can fetch from it.
    pub probe: u64,
    /// Drawn for this hello.
    pub random: [u8; 16],
}

/// What the other side answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Whether it goes on.
    pub verdict: Verdict,
    /// The last control frame that the answerer has heard.
    pub heard: u32,
    /// As in the hello.
    pub probe: u64,
    /// Whether the answerer wants checksums.
    pub checks: bool,
    /// Drawn for this answer.
    pub random: [u8; 16],
    /// That the answerer knows the token.
    pub proof: [u8; PROOF],
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
    Wire(#[from] super::transport::wire::WireError),
    /// Whoever is there speaks TLS only.
    #[error("it speaks TLS only, and this engine has no certificates: give every engine some, or none")]
    Secured,
    /// What came is no hello.
    #[error("whoever is there speaks another protocol")]
    Protocol,
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

impl Hello {
    fn encode(&self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[0..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&self.from.task.0.to_le_bytes());
        bytes[12..20].copy_from_slice(&self.from.incarnation.get().to_le_bytes());
        bytes[20..24].copy_from_slice(&self.to.task.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.to.incarnation.get().to_le_bytes());
        bytes[32..40].copy_from_slice(&self.nonce.to_le_bytes());
        bytes[40..42].copy_from_slice(&self.lane.to_le_bytes());
        let flags = [self.control, self.begins, self.fetch, self.checks, self.token];
        bytes[42] = flags.iter().enumerate().fold(0, |bits, (at, set)| bits | u8::from(*set) << at);
        bytes[44..48].copy_from_slice(&self.chunk.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.heard.to_le_bytes());
        bytes[56..64].copy_from_slice(&self.probe.to_le_bytes());
        bytes[64..80].copy_from_slice(&self.random);
        seal(&mut bytes);
        bytes
    }

    fn decode(bytes: &[u8; HELLO]) -> Option<Self> {
        if bytes[0..8] != MAGIC[..] || !is_sealed(bytes) {
            return None;
        }
        let member = |task, incarnation| {
            let incarnation = Incarnation::new(u64_at(bytes, incarnation))?;
            Some(Member { task: TaskId(u32_at(bytes, task)), incarnation })
        };
        let flag = |at: u8| bytes[42] >> at & 1 != 0;
        let mut random = [0; 16];
        random.copy_from_slice(&bytes[64..80]);
        Some(Self {
            from: member(8, 12)?,
            to: member(20, 24)?,
            nonce: u64_at(bytes, 32),
            lane: u16::from_le_bytes([bytes[40], bytes[41]]),
            control: flag(0),
            begins: flag(1),
            fetch: flag(2),
            checks: flag(3),
            token: flag(4),
            chunk: u32_at(bytes, 44),
            heard: u32_at(bytes, 48),
            probe: u64_at(bytes, 56),
            random,
        })
    }
}

impl Answer {
    fn encode(&self) -> [u8; ANSWER] {
        let (code, detail) = match self.verdict {
            Verdict::Welcome => (0, 0),
            Verdict::NotMe(now) => (1, now.map_or(0, Incarnation::get)),
            Verdict::NotYou(now) => (2, now.map_or(0, Incarnation::get)),
            Verdict::Busy => (3, 0),
            Verdict::Token => (4, 0),
            Verdict::NoSuchLink => (5, 0),
            Verdict::Full => (6, 0),
        };
        let mut bytes = [0; ANSWER];
        bytes[0..8].copy_from_slice(MAGIC);
        bytes[8] = code;
        bytes[9] = u8::from(self.checks);
        bytes[12..16].copy_from_slice(&self.heard.to_le_bytes());
        bytes[16..24].copy_from_slice(&detail.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.probe.to_le_bytes());
        bytes[32..48].copy_from_slice(&self.random);
        bytes[48..80].copy_from_slice(&self.proof);
        seal(&mut bytes);
        bytes
    }

    fn decode(bytes: &[u8; ANSWER]) -> Option<Self> {
        if bytes[0..8] != MAGIC[..] || !is_sealed(bytes) {
            return None;
        }
        let detail = Incarnation::new(u64_at(bytes, 16));
        let verdict = match bytes[8] {
            0 => Verdict::Welcome,
            1 => Verdict::NotMe(detail),
            2 => Verdict::NotYou(detail),
            3 => Verdict::Busy,
            4 => Verdict::Token,
            5 => Verdict::NoSuchLink,
            6 => Verdict::Full,
            _ => return None,
        };
        let (mut random, mut proof) = ([0; 16], [0; PROOF]);
        random.copy_from_slice(&bytes[32..48]);
        proof.copy_from_slice(&bytes[48..80]);
        let (heard, probe, checks) = (u32_at(bytes, 12), u64_at(bytes, 24), bytes[9] != 0);
        Some(Self { verdict, heard, probe, checks, random, proof })
    }
}

/// What is proven: who says it, all that was said, and what both drew.
fn prove(token: Option<&[u8]>, who: &[u8], hello: &[u8; HELLO], random: &[u8; 16]) -> [u8; PROOF] {
    let Some(token) = token else { return [0; PROOF] };
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, token);
    let mut context = ring::hmac::Context::with_key(&key);
    context.update(who);
    context.update(hello);
    context.update(random);
    let mut proof = [0; PROOF];
    proof.copy_from_slice(context.sign().as_ref());
    proof
}

/// Whether a proof is the right one, without telling by its time where it differs.
fn is(proof: &[u8; PROOF], wanted: [u8; PROOF]) -> bool {
    proof.ct_eq(&wanted).into()
}

/// Dials on a socket that is connected and has time limits.
pub fn dial(
    socket: &mut (impl Read + Write),
    hello: &Hello,
    token: Option<&[u8]>,
) -> Result<Answer, HelloError> {
    let hello = Hello { token: token.is_some(), ..*hello }.encode();
    socket.write_all(&hello)?;
    let mut bytes = [0; ANSWER];
    // As much as an alert of TLS has, which is all that comes from whoever expects a handshake.
    let (head, rest) = bytes.split_at_mut(ALERT.1);
    socket.read_exact(head)?;
    if head.starts_with(&ALERT.0) {
        return Err(HelloError::Secured);
    }
    socket.read_exact(rest)?;
    let answer = Answer::decode(&bytes).ok_or(HelloError::Protocol)?;
    if answer.verdict != Verdict::Welcome {
        return Err(HelloError::Refused(answer.verdict));
    }
    if !is(&answer.proof, prove(token, b"answer", &hello, &answer.random)) {
        return Err(HelloError::Impostor);
    }
    socket.write_all(&prove(token, b"confirm", &hello, &answer.random))?;
    Ok(answer)
}

/// What is answered to a hello, apart from proofs.
pub struct Judged {
    /// Whether it goes on.
    pub verdict: Verdict,
    /// The last control frame that was heard.
    pub heard: u32,
    /// Where the probe lies.
    pub probe: u64,
    /// Whether this side wants checksums.
    pub checks: bool,
}

/// Reads a hello, asks `judge` what to say to it, and answers. A hello whose token is wrong is never accepted.
pub fn answer(
    socket: &mut (impl Read + Write),
    token: Option<&[u8]>,
    random: [u8; 16],
    judge: impl FnOnce(&Hello) -> Judged,
) -> Result<Hello, HelloError> {
    let mut bytes = [0; HELLO];
    socket.read_exact(&mut bytes)?;
    let hello = Hello::decode(&bytes).ok_or(HelloError::Protocol)?;
    let Judged { verdict, heard, probe, checks } = if hello.token == token.is_some() {
        judge(&hello)
    } else {
        Judged { verdict: Verdict::Token, heard: 0, probe: 0, checks: false }
    };
    let proof = prove(token, b"answer", &bytes, &random);
    let answer = Answer { verdict, heard, probe, checks, random, proof };
    socket.write_all(&answer.encode())?;
    if verdict != Verdict::Welcome {
        return Err(HelloError::Refused(verdict));
    }
    let mut confirmed = [0; PROOF];
    socket.read_exact(&mut confirmed)?;
    if !is(&confirmed, prove(token, b"confirm", &bytes, &random)) {
        return Err(HelloError::Refused(Verdict::Token));
    }
    Ok(hello)
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
            token: false,
            probe: 7,
            random: [8; 16],
        }
    }

    fn meet(here: Option<&[u8]>, there: Option<&[u8]>, verdict: Verdict) -> [Result<(), String>; 2] {
        let (mut a, mut b) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let judged = Judged { verdict, heard: 10, probe: 11, checks: true };
            let answering = scope.spawn(move || answer(&mut b, there, [9; 16], |_| judged));
            let dialled = dial(&mut a, &hello(), here)
                .map(|answer| assert_eq!((answer.heard, answer.probe, answer.checks), (10, 11, true)));
            drop(a);
            let answered = answering.join().unwrap().map(|heard| {
                assert_eq!(heard, Hello { token: here.is_some(), ..hello() });
            });
            [dialled.map_err(|error| error.to_string()), answered.map_err(|error| error.to_string())]
        })
    }

    #[test]
    fn equal_tokens_meet_and_others_do_not() {
        assert_eq!(meet(None, None, Verdict::Welcome), [Ok(()), Ok(())]);
        assert_eq!(meet(Some(b"s"), Some(b"s"), Verdict::Welcome), [Ok(()), Ok(())]);
        for (here, there) in [(None, Some(&b"s"[..])), (Some(&b"s"[..]), None), (Some(b"s"), Some(b"t"))] {
            let [dialled, answered] = meet(here, there, Verdict::Welcome);
            assert!(dialled.is_err() && answered.is_err(), "{here:?} {there:?}");
        }
    }

    #[test]
    fn a_hello_or_an_answer_with_any_bit_changed_is_none() {
        let answer = Answer {
            verdict: Verdict::Welcome,
            heard: 1,
            probe: 2,
            checks: true,
            random: [3; 16],
            proof: [4; PROOF],
        };
        assert_eq!(Hello::decode(&hello().encode()), Some(hello()));
        assert_eq!(Answer::decode(&answer.encode()), Some(answer));
        for bit in 0..8 * HELLO {
            let (mut said, mut answered) = (hello().encode(), answer.encode());
            said[bit / 8] ^= 1 << (bit % 8);
            answered[bit / 8] ^= 1 << (bit % 8);
            assert_eq!((Hello::decode(&said), Answer::decode(&answered)), (None, None), "bit {bit}");
        }
    }

    #[test]
    fn a_refusal_says_why() {
        let now = Incarnation::new(77);
        let [dialled, _] = meet(None, None, Verdict::NotMe(now));
        assert!(dialled.unwrap_err().contains("000000000000004d"));
    }
}
