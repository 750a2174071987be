//! Starts the processes of the benchmark, sends orders to them, and waits for each reply within a time limit.
//!
//! Begin at `BenchChildren::send_orders_and_collect_replies`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};

use super::protocol::{BenchOrder, BenchReply, PEER, PairSide};
use crate::cli::self_command;
use crate::clock;

/// The time to wait for the exit of a task after another one has failed: it may be the cause.
const FAILURE_CAUSE_WAIT: Duration = Duration::from_millis(300);

/// A line of a task; `None` at the end of its output.
type ChildLine = (usize, io::Result<Option<String>>);

struct ChildTask {
    child: Child,
    orders: ChildStdin,
}

impl Drop for ChildTask {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All tasks by number. In each pair, the sender comes before the receiver.
pub struct BenchChildren {
    tasks: Vec<ChildTask>,
    heard: Receiver<ChildLine>,
}

impl BenchChildren {
    /// Starts this many processes.
    pub fn start(count: u32) -> Result<Self> {
        let (tell, heard) = channel();
        let tasks = (0..count as usize).map(|number| start_task(number, &tell)).collect::<Result<_>>()?;
        Ok(Self { tasks, heard })
    }

    pub const fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Sends each task its order, in this sequence, and returns the replies by task. If a task does not reply
    /// within `limit`, the error names the task and its order.
    pub fn send_orders_and_collect_replies(
        &mut self,
        orders: &[(usize, BenchOrder)],
        limit: Duration,
    ) -> Result<BTreeMap<usize, BenchReply>> {
        for (number, order) in orders {
            let line = serde_json::to_string(order)? + "\n";
            if self.tasks[*number].orders.write_all(line.as_bytes()).is_err() {
                return Err(self.child_exit_error(*number, order));
            }
        }
        let until = clock::monotonic() + limit;
        let mut answers = BTreeMap::new();
        while let Some((_, asked)) = orders.iter().find(|(number, _)| !answers.contains_key(number)) {
            let left = until.saturating_duration_since(clock::monotonic());
            let (number, line) = match self.heard.recv_timeout(left) {
                Ok(heard) => heard,
                Err(RecvTimeoutError::Timeout) => {
                    let silent = orders.iter().map(|(number, _)| *number);
                    let silent = silent.filter(|number| !answers.contains_key(number)).collect::<Vec<_>>();
                    return Err(self.no_reply_error(&silent, asked, limit));
                }
                Err(RecvTimeoutError::Disconnected) => bail!("nobody listens to the tasks of the benchmark"),
            };
            let order = orders.iter().find(|(asked, _)| *asked == number).map_or(asked, |(_, order)| order);
            let Some(line) =
                line.with_context(|| format!("{} cannot be heard", self.task_name_text(number)))?
            else {
                return Err(self.child_exit_error(number, order));
            };
            let answer = serde_json::from_str(&line)
                .with_context(|| format!("{} answered what makes no sense", self.task_name_text(number)))?;
            if let BenchReply::Failed(why) = answer {
                return Err(self.task_failure_error(number, order, &why));
            }
            answers.insert(number, answer);
        }
        Ok(answers)
    }

    /// Returns the name of a task in words.
    fn task_name_text(&self, number: usize) -> String {
        let side = match PairSide::of_task(number) {
            PairSide::Sender => "sender",
            PairSide::Receiver => "receiver",
        };
        format!("task {number} of the benchmark ({side}, process {})", self.tasks[number].child.id())
    }

    fn child_exit_error(&mut self, number: usize, order: &BenchOrder) -> anyhow::Error {
        let name = self.task_name_text(number);
        match self.tasks[number].child.wait() {
            Ok(status) => anyhow!(
                "{name} has ended ({status}) although it was asked {order}: nothing can be measured without it; \
                 find what ended it, and measure again"
            ),
            Err(error) => anyhow!("{name} has ended, and nobody knows how: {error}"),
        }
    }

    /// Returns the error for a failed task: the exit of another task, if that is the likely cause.
    fn task_failure_error(&mut self, number: usize, order: &BenchOrder, why: &str) -> anyhow::Error {
        let until = clock::monotonic() + FAILURE_CAUSE_WAIT;
        while let Ok((other, line)) =
            self.heard.recv_timeout(until.saturating_duration_since(clock::monotonic()))
        {
            if matches!(line, Ok(None)) {
                return self.child_exit_error(other, order);
            }
        }
        anyhow!("{} was asked {order}, and failed: {why}", self.task_name_text(number))
    }

    /// Returns the error for tasks that did not reply.
    fn no_reply_error(&self, silent: &[usize], order: &BenchOrder, limit: Duration) -> anyhow::Error {
        let mut text = format!("no answer within {limit:?} from those that were asked {order}:");
        let mut stopped = Vec::new();
        for number in silent {
            let id = self.tasks[*number].child.id();
            let state = process_state(id);
            // Writing to a string cannot fail.
            let _ = write!(text, "\n  {}: {}", self.task_name_text(*number), process_state_text(state));
            if matches!(state, Some('T' | 't')) {
                stopped.push(id.to_string());
            }
        }
        let next = if stopped.is_empty() {
            "measure again; if it comes again, measure less at a time (--size, --batch, --pairs), or see what holds these \
             processes up"
                .to_owned()
        } else {
            format!(
                "whoever waits for what is stopped cannot answer either; find who stopped {}, and measure again",
                { stopped.join(" and ") }
            )
        };
        anyhow!("{text}\n{next}")
    }
}

fn start_task(number: usize, tell: &Sender<ChildLine>) -> Result<ChildTask> {
    let mut child = self_command::self_exec_command()
        .args(["transfer", PEER, "--parent", &std::process::id().to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start a task of the benchmark")?;
    let orders = child.stdin.take().context("no pipe to the task")?;
    let answers = child.stdout.take().context("no pipe from the task")?;
    let task = ChildTask { child, orders };
    let tell = tell.clone();
    // The thread ends with the output of the task, or when the receiver is dropped.
    thread::Builder::new()
        .name(format!("task-{number}"))
        .spawn(move || {
            let mut answers = BufReader::new(answers);
            loop {
                let mut line = String::new();
                let read = answers.read_line(&mut line).map(|bytes| (bytes > 0).then_some(line));
                let last = !matches!(read, Ok(Some(_)));
                if tell.send((number, read)).is_err() || last {
                    return;
                }
            }
        })
        .context("cannot start a thread that listens to a task of the benchmark")?;
    Ok(task)
}

/// Returns the state of a process, as the letter that /proc shows.
fn process_state(process: u32) -> Option<char> {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    text.rsplit_once(") ")?.1.chars().next()
}

const fn process_state_text(state: Option<char>) -> &'static str {
    match state {
        Some('T' | 't') => "it is stopped",
        Some('R') => "it is at work",
        Some('D') => "it waits for a disk or for the system",
        Some('S') => "it waits",
        Some('Z' | 'X') | None => "it has ended",
        Some(_) => "it is in a state that is not known here",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_a_state() {
        assert!(
            matches!(process_state(std::process::id()), Some('R' | 'S')),
            "{:?}",
            process_state(std::process::id())
        );
        assert_eq!(process_state_text(process_state(u32::MAX)), "it has ended");
        assert_eq!(process_state_text(Some('T')), "it is stopped");
    }
}
