//! The attacks, and the code that they share.
//!
//! If the server ends a connection, the attacker opens another one, at a limited rate.

mod flood;
mod http;
mod peer;
mod streams;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

use crate::process::{end_with_parent, tell, tell_json, wait_for};
use crate::{Target, clock};

/// An attack on a server.
pub struct Attack {
    pub name: &'static str,
    /// The attack and its strength, in words.
    pub what: &'static str,
    /// Whether nothing is attacked: the control of the comparison.
    pub is_control: bool,
    /// Whether the server's audit goes to a pipe that no process reads.
    pub blocks_audit: bool,
    /// Whether the well-behaved client stores large values meanwhile.
    pub stores: bool,
    /// The preparation before the server's memory is measured for the first time.
    prepare: fn(&mut Attacker) -> Result<()>,
    attack: fn(&mut Attacker) -> Result<()>,
}

const fn attack(name: &'static str, what: &'static str, attack: fn(&mut Attacker) -> Result<()>) -> Attack {
    Attack { name, what, is_control: false, blocks_audit: false, stores: false, prepare: |_| Ok(()), attack }
}

/// All attacks, in their order.
pub static ATTACKS: [Attack; 22] = [
    Attack { is_control: true, ..attack("nothing", "no attack", |attacker| attacker.wait()) },
    Attack {
        is_control: true,
        ..attack("busy-processors", "two threads beside the server that only compute", flood::compute)
    },
    attack(
        "slow-bodies",
        "form and JSON bodies of 262,000 bytes over 50 HTTP connections, one byte a packet, 32,000 packets a second",
        http::slow_bodies,
    ),
    attack(
        "settings-churn",
        "two connections with 16,384 waiting calls each, SETTINGS of 682 changes of the window, 1.1 MiB/s",
        streams::settings_churn,
    ),
    Attack {
        prepare: streams::store_large,
        ..attack(
            "parked-heads",
            "a value of 17 MiB is not taken, then 16,000 calls with 16 KiB of headers behind it",
            streams::parked_heads,
        )
    },
    Attack {
        blocks_audit: true,
        ..attack("blocked-audit", "changes over HTTP, with an audit file that nobody reads", http::changes)
    },
    attack(
        "mass-cancel",
        "262,144 calls wait for one key, then hang up, again and again",
        streams::mass_cancel,
    ),
    attack(
        "hpack-names",
        "28,000 references a block to a name of 4,000 bytes, four connections, 27 MB/s",
        streams::hpack_names,
    ),
    attack(
        "colliding-streams",
        "stream ids 1 + 65536 n with calls that wait, and updates of their windows, two connections, 8 MB/s",
        streams::colliding_streams,
    ),
    Attack {
        prepare: streams::store_small,
        ..attack(
            "never-empty-output",
            "answers of 4,000 bytes over 32 connections with a tiny window and segments of 536 bytes, of which some always wait",
            streams::never_empty,
        )
    },
    Attack {
        stores: true,
        ..attack("announced-bodies", "two messages of 476 MiB are announced and trickle", streams::announced)
    },
    attack("silent-http", "1,024 silent or half-head HTTP connections, renewed", http::silent),
    attack("dribbled-bodies", "1,024 HTTP bodies of one byte every 2 s, renewed", http::dribbled),
    Attack {
        prepare: streams::store_million,
        ..attack("listed-keys", "a million keys, four readers that list their directory", http::listed_keys)
    },
    attack("continuation", "header blocks without an end, four connections", flood::continuation),
    attack("rapid-reset", "calls that are given up at once, four connections, 20 MB/s", flood::rapid_reset),
    attack("ping", "PING, four connections, 20 MB/s", flood::ping),
    Attack {
        prepare: streams::store_small,
        ..attack("unread-output", "answers that nobody reads, 16 connections", flood::unread)
    },
    attack("settings", "empty SETTINGS, four connections, 20 MB/s", flood::settings),
    attack(
        "random-frames",
        "frames of random kind, flags, stream and contents, eight connections",
        flood::random,
    ),
    attack("idle", "4,000 connections that say nothing after their preface", flood::idle),
    attack(
        "connections",
        "connections that are opened and closed at once, 2,000 a second",
        flood::connections,
    ),
];

/// The attacker's report.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// The server's answers, with the number of each.
    pub told: BTreeMap<String, u64>,
    /// The number of sent bytes.
    pub sent: u64,
    /// The reason for which it could not attack.
    pub broken: Option<String>,
}

impl Outcome {
    pub fn broken(why: &anyhow::Error) -> Self {
        Self { broken: Some(format!("{why:#}")), ..Self::default() }
    }

    /// Returns all answers, the most frequent first.
    pub fn text(&self) -> String {
        let mut told: Vec<_> = self.told.iter().collect();
        told.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let told: Vec<_> = told.iter().map(|(what, count)| format!("{what} x {count}")).collect();
        if told.is_empty() { "nothing".to_owned() } else { told.join(", ") }
    }
}

/// The attacking process.
pub struct Attacker {
    pub grpc: SocketAddr,
    pub http: SocketAddr,
    outcome: Outcome,
    length: Duration,
    until: Instant,
    /// The limit on sent bytes a second, if there is one, counted from the beginning.
    rate: Option<u64>,
    granted: u64,
    began: Instant,
    connected: u64,
}

/// The greatest number of new connections a second.
const CONNECTIONS_PER_SECOND: u64 = 2_000;

impl Attacker {
    /// Counts an answer of the server.
    pub fn told(&mut self, what: impl Into<String>) {
        *self.outcome.told.entry(what.into()).or_default() += 1;
    }

    /// Returns whether the attack continues.
    pub fn goes_on(&self) -> bool {
        clock::now() < self.until
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(clock::now())
    }

    /// Waits until the end of the attack.
    #[expect(clippy::unnecessary_wraps, reason = "an attack like any other")]
    pub fn wait(&mut self) -> Result<()> {
        std::thread::sleep(self.left());
        Ok(())
    }

    /// Limits the number of sent bytes a second from now on.
    pub fn limit(&mut self, bytes_per_second: u64) {
        self.rate = Some(bytes_per_second);
    }

    /// Permits `bytes` beyond the limit: they prepare the attack.
    pub fn grant(&mut self, bytes: usize) {
        self.granted += bytes as u64;
    }

    /// Returns the number of bytes that may be sent now.
    pub fn room(&self) -> u64 {
        let Some(rate) = self.rate else { return u64::MAX };
        let allowed = (self.began.elapsed().as_secs_f64() * rate as f64) as u64;
        (self.granted + allowed).saturating_sub(self.outcome.sent)
    }

    /// Returns whether another connection may be opened now.
    pub fn may_connect(&mut self) -> bool {
        let allowed = 4_200 + self.began.elapsed().as_millis() as u64 * CONNECTIONS_PER_SECOND / 1000;
        let may = self.connected < allowed;
        self.connected += u64::from(may);
        may
    }

    pub fn sent(&mut self, bytes: usize) {
        self.outcome.sent += bytes as u64;
    }
}

/// Runs the attacker until the benchmark has its report.
pub fn run(attack: &Attack, target: &Target) -> Result<()> {
    end_with_parent()?;
    let hard = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard })?;
    let now = clock::now();
    let mut attacker = Attacker {
        grpc: target.grpc,
        http: target.http,
        outcome: Outcome::default(),
        length: Duration::from_secs(target.seconds),
        until: now + Duration::from_secs(3600),
        rate: None,
        granted: 0,
        began: now,
        connected: 0,
    };
    (attack.prepare)(&mut attacker)?;
    attacker.outcome = Outcome::default();
    tell("ready")?;
    wait_for("begin")?;
    attacker.began = clock::now();
    attacker.until = attacker.began + attacker.length;
    (attacker.rate, attacker.granted, attacker.connected) = (None, 0, 0);
    if let Err(error) = (attack.attack)(&mut attacker) {
        attacker.outcome.broken = Some(format!("{error:#}"));
    }
    tell_json(&attacker.outcome)
}
