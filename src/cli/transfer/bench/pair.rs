//! The conductor's side: the tasks, and what is measured with them.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::figures::{Delays, Moved, Prepares};
use super::talk::{Answer, Order, Setup, Side};
use super::{PEER, Shape};
use crate::clock;
use crate::transfer::{Incarnation, Member, Membership, Peer, TaskId, TransportKind};

/// How many preparations are timed once the connections are there.
const PREPARES: u32 = 1000;
/// The most rounds of a latency measurement, so that what it reports stays small.
const ROUNDS_MAX: u64 = 20_000;

/// A process that is told what to do.
struct Task {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Task {
    fn start() -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["transfer", PEER, "--parent", &std::process::id().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a task of the benchmark")?;
        let orders = child.stdin.take().context("no pipe to the task")?;
        let answers = BufReader::new(child.stdout.take().context("no pipe from the task")?);
        Ok(Self { child, orders, answers })
    }

    fn order(&mut self, order: &Order) -> Result<()> {
        let line = serde_json::to_string(order)? + "\n";
        self.orders.write_all(line.as_bytes()).context("a task of the benchmark has ended")
    }

    fn answer(&mut self) -> Result<Answer> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.is_empty() {
            bail!("a task of the benchmark has ended: {}", self.child.wait()?);
        }
        match serde_json::from_str(&line)? {
            Answer::Failed(why) => bail!(why),
            answer => Ok(answer),
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All tasks: of each pair the sender, then the receiver.
pub struct Tasks {
    tasks: Vec<Task>,
    measurement: u64,
}

impl Tasks {
    /// Starts them and makes them known to each other.
    pub fn start(pairs: u32, setup: &Setup) -> Result<Self> {
        let members = (0..2 * pairs).map(member).collect::<Result<Vec<_>>>()?;
        let tasks = members.iter().map(|_| Task::start()).collect::<Result<Vec<_>>>()?;
        let mut all = Self { tasks, measurement: clock::random_u64() };
        for (number, task) in all.tasks.iter_mut().enumerate() {
            let (here, there) = (members[number], members[number ^ 1]);
            let side = if number % 2 == 0 { Side::Sender } else { Side::Receiver };
            task.order(&Order::Begin { setup: setup.clone(), here, there, side })?;
        }
        let peers = all.answers(|answer| match answer {
            Answer::Here(peer) => Some(peer),
            _ => None,
        })?;
        let peers: BTreeMap<TaskId, Peer> = members.iter().map(|member| member.task).zip(peers).collect();
        all.all(&Order::Meet(Membership { peers }))?;
        Ok(all)
    }

    /// The answers of all, each of the kind that was asked for.
    fn answers<T>(&mut self, kind: impl Fn(Answer) -> Option<T>) -> Result<Vec<T>> {
        self.tasks
            .iter_mut()
            .map(|task| kind(task.answer()?).context("a task answered something else than was asked"))
            .collect()
    }

    fn all_answers<T>(&mut self, order: &Order, kind: impl Fn(Answer) -> Option<T>) -> Result<Vec<T>> {
        for task in &mut self.tasks {
            task.order(order)?;
        }
        self.answers(kind)
    }

    fn all(&mut self, order: &Order) -> Result<()> {
        self.all_answers(order, |answer| matches!(answer, Answer::Done).then_some(()))?;
        Ok(())
    }

    /// What preparing costs: of all pairs the first time, of the first sender afterwards.
    pub fn prepares(&mut self) -> Result<Prepares> {
        let all = self.all_answers(&Order::Prepare { again: PREPARES }, |answer| match answer {
            Answer::Prepared { first, again } => Some((first, again)),
            _ => None,
        })?;
        let senders: Vec<_> = all.into_iter().step_by(2).collect();
        Ok(Prepares::new(&senders))
    }

    /// Has the buffers for a size cut and prepared.
    pub fn arrange(&mut self, shape: Shape) -> Result<()> {
        self.all(&Order::Arrange(shape))
    }

    /// Has them given back.
    pub fn clear(&mut self) -> Result<()> {
        self.all(&Order::Clear)
    }

    fn fill(&mut self) -> Result<()> {
        self.measurement = self.measurement.wrapping_add(1);
        let measurement = self.measurement;
        self.all(&Order::Fill { measurement })
    }

    fn check(&mut self) -> Result<Option<String>> {
        let measurement = self.measurement;
        let wrong = self.all_answers(&Order::Check { measurement }, |answer| match answer {
            Answer::Checked { wrong } => Some(wrong),
            _ => None,
        })?;
        Ok(wrong.into_iter().flatten().next())
    }

    /// Launches of all pairs at once: how long they took in all, and by what they went.
    fn launch(&mut self, launches: u64) -> Result<(Duration, TransportKind)> {
        let moved = self.all_answers(&Order::Move { launches }, |answer| match answer {
            Answer::Moved { began, ended, by } => Some((began, ended, by)),
            _ => None,
        })?;
        // From the first launch of a sender until the last byte is in place at a receiver.
        let began = moved.iter().step_by(2).map(|moved| moved.0).min().unwrap_or(0);
        let ended = moved.iter().skip(1).step_by(2).map(|moved| moved.1).max().unwrap_or(0);
        // What a receiver fetches, its sender does not see.
        let by = moved.get(1).context("no receiver")?.2;
        Ok((Duration::from_nanos(ended.saturating_sub(began).max(1)), by))
    }

    /// A few launches: by what they went, and what is wrong.
    pub fn try_out(&mut self) -> Result<(TransportKind, Option<String>)> {
        self.fill()?;
        let (_, by) = self.launch(4)?;
        Ok((by, self.check()?))
    }

    /// Moves as much as it can for about so long.
    pub fn throughput(&mut self, shape: Shape, time: Duration) -> Result<Moved> {
        let mut launches = 2 * shape.in_flight as u64;
        // The first ones are checked too, and show how many are needed: until a quarter of the time was measured.
        let mut wrong = None;
        loop {
            self.fill()?;
            let (took, _) = self.launch(launches)?;
            wrong = wrong.or(self.check()?);
            let times = time.as_secs_f64() / took.as_secs_f64();
            if times <= 4.0 {
                launches = ((launches as f64 * times) as u64).max(shape.in_flight as u64);
                break;
            }
            launches = (launches as f64 * times.min(64.0) / 2.0).ceil() as u64;
        }
        self.fill()?;
        let (took, by) = self.launch(launches)?;
        wrong = wrong.or(self.check()?);
        let pairs = self.tasks.len() as u64 / 2;
        let bytes = launches * pairs * (shape.size * shape.batch) as u64;
        Ok(Moved { rate: bytes as f64 / took.as_secs_f64() / 1e9, by, wrong })
    }

    /// To and fro, one at a time, for about so long. Only the first pair; the others rest.
    pub fn latency(&mut self, time: Duration) -> Result<Delays> {
        let (near, far) = self.toss(10)?;
        let round = Duration::from_nanos(near.span() / 10).max(Duration::from_nanos(1));
        let rounds = (time.as_nanos() / round.as_nanos()).clamp(10, u128::from(ROUNDS_MAX)) as u64;
        let warm = [near.wrong, far.wrong].into_iter().flatten().next();
        let (near, far) = self.toss(rounds)?;
        let wrong = [warm, near.wrong.clone(), far.wrong.clone()].into_iter().flatten().next();
        Ok(Delays::new(&near, &far, wrong))
    }

    fn toss(&mut self, rounds: u64) -> Result<(Tossed, Tossed)> {
        self.measurement = self.measurement.wrapping_add(1);
        let measurement = self.measurement;
        // The receiver first: what it expects must be posted before the first one comes.
        for number in [1, 0] {
            self.tasks[number].order(&Order::Toss { rounds, measurement })?;
        }
        let mut ends = Vec::new();
        for task in &mut self.tasks[..2] {
            let Answer::Tossed { launched, arrived, wrong } = task.answer()? else {
                bail!("a task answered something else than was asked");
            };
            ends.push(Tossed { launched, arrived, wrong });
        }
        let far = ends.pop().context("no receiver")?;
        let near = ends.pop().context("no sender")?;
        Ok((near, far))
    }
}

/// What one end of a pair saw of a latency measurement.
#[derive(Debug, Clone)]
pub struct Tossed {
    pub launched: Vec<u64>,
    pub arrived: Vec<u64>,
    pub wrong: Option<String>,
}

impl Tossed {
    /// From the first launch to the last arrival.
    fn span(&self) -> u64 {
        let first = self.launched.first().copied().unwrap_or(0);
        self.arrived.last().copied().unwrap_or(0).saturating_sub(first)
    }
}

fn member(task: u32) -> Result<Member> {
    let incarnation = Incarnation::new(clock::random_u64() | 1).context("no incarnation")?;
    Ok(Member { task: TaskId(task), incarnation })
}
