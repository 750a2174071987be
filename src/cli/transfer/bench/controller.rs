//! Controls the processes of the benchmark during one measurement.
//!
//! The transfer engines are in these processes (`peer.rs`). Begin at `BenchController::measure_throughput`.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::children::BenchChildren;
use super::protocol::{BenchEngineSetup, BenchOrder, BenchReply, BenchShape, PairSide};
use super::results::{LatencySample, PingPongTimes, PrepareTimes, ThroughputSample};
use crate::clock;
use crate::host_checks::ProbedGpus;
use crate::transfer::{Incarnation, MemberId, MemberInfo, Membership, TaskId, TransportKind};

/// The number of preparations that are timed once the connections exist.
const PREPARES: u32 = 1000;
/// The maximum number of rounds of a latency measurement, which bounds the size of a reply.
const ROUNDS_MAX: u64 = 20_000;

/// The bytes per second that the slowest machine fills, compares or moves.
const SLOWEST: u64 = 25_000_000;

/// Controls all tasks. In each pair, the sender comes before the receiver.
pub struct BenchController {
    children: BenchChildren,
    measurement: u64,
    /// The time that a reply may take beyond the measurement.
    grace: Duration,
    /// The time that the present buffers may take.
    handling: Duration,
}

impl BenchController {
    /// Starts the tasks and introduces them to each other. A reply may take `grace` beyond the time that it
    /// needs at the slowest.
    pub fn start(pairs: u32, setup: &BenchEngineSetup, grace: Duration) -> Result<Self> {
        let members = (0..2 * pairs).map(bench_member).collect::<Result<Vec<_>>>()?;
        let children = BenchChildren::start(2 * pairs)?;
        let mut all = Self { children, measurement: clock::random_u64(), grace, handling: Duration::ZERO };
        let begin = |number: usize| {
            let (here, there) = (members[number], members[number ^ 1]);
            (number, BenchOrder::Begin { setup: setup.clone(), here, there, side: PairSide::of_task(number) })
        };
        let orders: Vec<_> = (0..members.len()).map(begin).collect();
        let answers =
            all.children.send_orders_and_collect_replies(&orders, all.reply_timeout(Duration::ZERO))?;
        let peers = replies_of_kind(answers, |answer| match answer {
            BenchReply::Here(peer) => Some(peer),
            _ => None,
        })?;
        let peers: BTreeMap<TaskId, MemberInfo> =
            members.iter().map(|member| member.task).zip(peers).collect();
        all.send_order_to_all(&BenchOrder::SetMembership(Membership::of_own_job(peers)))?;
        Ok(all)
    }

    /// Returns the time limit of a reply: twice the intended measurement, and the time for the buffers.
    fn reply_timeout(&self, measured: Duration) -> Duration {
        self.grace.saturating_add(self.handling).saturating_add(measured.saturating_mul(2))
    }

    /// Sends one order to all tasks and returns their replies, each of the expected kind.
    fn send_order_and_collect_replies<T>(
        &mut self,
        order: &BenchOrder,
        measured: Duration,
        kind: impl Fn(BenchReply) -> Option<T>,
    ) -> Result<Vec<T>> {
        let orders: Vec<_> = (0..self.children.len()).map(|number| (number, order.clone())).collect();
        replies_of_kind(
            self.children.send_orders_and_collect_replies(&orders, self.reply_timeout(measured))?,
            kind,
        )
    }

    fn send_order_to_all(&mut self, order: &BenchOrder) -> Result<()> {
        self.send_order_and_collect_replies(order, Duration::ZERO, |answer| {
            matches!(answer, BenchReply::Done).then_some(())
        })?;
        Ok(())
    }

    /// Measures preparation: the first one of all pairs, and later ones of the first sender.
    pub fn measure_preparations(&mut self) -> Result<PrepareTimes> {
        let all = self.send_order_and_collect_replies(
            &BenchOrder::Prepare { again: PREPARES },
            Duration::ZERO,
            |answer| match answer {
                BenchReply::Prepared { first, again } => Some((first, again)),
                _ => None,
            },
        )?;
        let senders: Vec<_> = all.into_iter().step_by(2).collect();
        Ok(PrepareTimes::new(&senders))
    }

    /// Allocates and prepares the buffers for a size.
    pub fn allocate_buffers(&mut self, shape: BenchShape) -> Result<()> {
        let bytes = (shape.memory_bytes() as u64).saturating_mul(self.children.len() as u64);
        self.handling = Duration::from_secs(bytes / SLOWEST);
        self.send_order_to_all(&BenchOrder::Allocate(shape))
    }

    /// Frees the buffers.
    pub fn free_buffers(&mut self) -> Result<()> {
        self.send_order_to_all(&BenchOrder::Clear)
    }

    fn fill_buffers(&mut self) -> Result<()> {
        self.measurement = self.measurement.wrapping_add(1);
        let measurement = self.measurement;
        self.send_order_to_all(&BenchOrder::Fill { measurement })
    }

    fn check_contents(&mut self) -> Result<Option<String>> {
        let measurement = self.measurement;
        let wrong = self.send_order_and_collect_replies(
            &BenchOrder::Check { measurement },
            Duration::ZERO,
            |answer| match answer {
                BenchReply::Checked { wrong } => Some(wrong),
                _ => None,
            },
        )?;
        Ok(wrong.into_iter().flatten().next())
    }

    /// Runs launches of all pairs at once. Returns the total time and the transport.
    fn run_launches(&mut self, launches: u64, about: Duration) -> Result<(Duration, TransportKind)> {
        let moved =
            self.send_order_and_collect_replies(
                &BenchOrder::Move { launches },
                about,
                |answer| match answer {
                    BenchReply::Moved { began, ended, by } => Some((began, ended, by)),
                    _ => None,
                },
            )?;
        // From the first launch of a sender until the last byte is in place at a receiver.
        let began = moved.iter().step_by(2).map(|moved| moved.0).min().unwrap_or(0);
        let ended = moved.iter().skip(1).step_by(2).map(|moved| moved.1).max().unwrap_or(0);
        // The sender does not see the bytes that a receiver fetches.
        let by = moved.get(1).context("no receiver")?.2;
        Ok((Duration::from_nanos(ended.saturating_sub(began).max(1)), by))
    }

    /// Returns the GPUs that a task sees.
    pub fn describe_gpus(&mut self) -> Result<ProbedGpus> {
        let replies = self.send_order_and_collect_replies(
            &BenchOrder::DescribeGpus,
            Duration::ZERO,
            |reply| match reply {
                BenchReply::Gpus(gpus) => Some(gpus),
                _ => None,
            },
        )?;
        replies.into_iter().next().context("no task has answered")
    }

    /// Runs a few launches. Returns the transport, and an error in the contents if there is one.
    pub fn run_trial_launches(&mut self) -> Result<(TransportKind, Option<String>)> {
        self.fill_buffers()?;
        let (_, by) = self.run_launches(4, Duration::ZERO)?;
        Ok((by, self.check_contents()?))
    }

    /// Measures throughput for about this time.
    pub fn measure_throughput(&mut self, shape: BenchShape, time: Duration) -> Result<ThroughputSample> {
        let mut launches = 2 * shape.in_flight as u64;
        // The first launches are checked too. They show how many launches are needed: they are doubled until
        // they take a quarter of the time.
        let mut wrong = None;
        loop {
            self.fill_buffers()?;
            let (took, _) = self.run_launches(launches, time)?;
            wrong = wrong.or(self.check_contents()?);
            let times = time.as_secs_f64() / took.as_secs_f64();
            if times <= 4.0 {
                launches = ((launches as f64 * times) as u64).max(shape.in_flight as u64);
                break;
            }
            launches = (launches as f64 * times.min(64.0) / 2.0).ceil() as u64;
        }
        self.fill_buffers()?;
        let (took, by) = self.run_launches(launches, time)?;
        wrong = wrong.or(self.check_contents()?);
        let pairs = self.children.len() as u64 / 2;
        let bytes = launches * pairs * (shape.size * shape.batch) as u64;
        Ok(ThroughputSample { rate: bytes as f64 / took.as_secs_f64() / 1e9, by, wrong })
    }

    /// Measures round trips, one at a time, for about this time. Only the first pair takes part.
    pub fn measure_latency(&mut self, time: Duration) -> Result<LatencySample> {
        let (near, far) = self.run_ping_pong(10, time)?;
        let round = Duration::from_nanos(near.span_nanos() / 10).max(Duration::from_nanos(1));
        let rounds = (time.as_nanos() / round.as_nanos()).clamp(10, u128::from(ROUNDS_MAX)) as u64;
        let warm = [near.wrong, far.wrong].into_iter().flatten().next();
        let (near, far) = self.run_ping_pong(rounds, time)?;
        let wrong = [warm, near.wrong.clone(), far.wrong.clone()].into_iter().flatten().next();
        Ok(LatencySample::new(&near, &far, wrong))
    }

    fn run_ping_pong(&mut self, rounds: u64, about: Duration) -> Result<(PingPongTimes, PingPongTimes)> {
        self.measurement = self.measurement.wrapping_add(1);
        let measurement = self.measurement;
        // The receiver gets its order first: it must have posted its first launch before the sender starts.
        let orders = [1, 0].map(|number| (number, BenchOrder::PingPong { rounds, measurement }));
        let answers = self.children.send_orders_and_collect_replies(&orders, self.reply_timeout(about))?;
        let mut ends = replies_of_kind(answers, |answer| match answer {
            BenchReply::Tossed { launched, arrived, calls, worked, by, wrong } => {
                Some(PingPongTimes { launched, arrived, calls, worked, by, wrong })
            }
            _ => None,
        })?;
        let far = ends.pop().context("no receiver")?;
        let near = ends.pop().context("no sender")?;
        Ok((near, far))
    }
}

/// Returns the replies in the order of the tasks, each of the expected kind.
fn replies_of_kind<T>(
    answers: BTreeMap<usize, BenchReply>,
    kind: impl Fn(BenchReply) -> Option<T>,
) -> Result<Vec<T>> {
    let of = |(number, answer)| {
        kind(answer)
            .with_context(|| format!("task {number} of the benchmark answered something else than was asked"))
    };
    answers.into_iter().map(of).collect()
}

fn bench_member(task: u32) -> Result<MemberId> {
    let incarnation = Incarnation::new(clock::random_u64() | 1).context("no incarnation")?;
    Ok(MemberId::of_own_job(TaskId(task), incarnation))
}
