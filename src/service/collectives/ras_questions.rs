//! The questions of the service to RAS, NCCL's own monitoring, and the answers.
//!
//! RAS is asked while cliques look stuck or lack reports. One process asks for the whole job: RAS then asks all processes of the job,
//! which costs each of them a message. Another process asks only after an answer, or when none can come any more. Begin at
//! [`RasQuestions::ask`].

use std::sync::Arc;
use std::time::Duration;

use muster_collectives::ras::{RAS_TIMEOUT, RasCommunicator};

use super::RAS_COMMUNICATORS_MAX;
use super::parse::ReportedRas;
use crate::coordination::Timestamp;

/// The shortest time between two questions about cliques that look stuck.
const STUCK_INTERVAL: Duration = Duration::from_secs(10);
/// The shortest time between two questions about cliques that only lack reports.
const LACKING_INTERVAL: Duration = Duration::from_secs(60);
/// The time after which no answer to a question can come: the process needs as long, and reports a little later.
const ANSWER_AWAITED: Duration = RAS_TIMEOUT.saturating_add(Duration::from_secs(10));
/// The number of processes up to which these times hold.
const PROCESSES_PER_INTERVAL: usize = 1000;
/// The age from which an answer says nothing about the present.
const ANSWER_KEPT: Duration = Duration::from_secs(120);

/// An answer of RAS.
#[derive(Debug)]
pub(super) struct RasAnswer {
    pub ras: ReportedRas,
    pub came_at: Timestamp,
}

/// The questions of a job. A copy shares the answer.
#[derive(Debug, Default, Clone)]
pub(super) struct RasQuestions {
    /// The cliques to ask about, and whether some of them look stuck.
    subjects: Vec<u64>,
    is_stuck: bool,
    asked_at: Option<Timestamp>,
    /// Whether the answer to the last question is awaited.
    is_asking: bool,
    answer: Option<Arc<RasAnswer>>,
    /// The last question without an answer. It leaves the answer that another process got.
    failure: Option<Arc<RasAnswer>>,
    /// The number of answers.
    pub answered: u64,
    /// The number of questions without an answer.
    pub failed: u64,
}

impl RasQuestions {
    /// Sets the cliques to ask about: those that look stuck, then those that lack reports.
    pub fn set_subjects(&mut self, stuck: &[u64], lacking: &[u64]) {
        self.is_stuck = !stuck.is_empty();
        let more = lacking.iter().filter(|hash| !stuck.contains(hash));
        self.subjects = stuck.iter().chain(more).take(RAS_COMMUNICATORS_MAX).copied().collect();
    }

    /// Takes the cliques to ask about from a copy.
    pub fn take_subjects(&mut self, copy: Self) {
        (self.subjects, self.is_stuck) = (copy.subjects, copy.is_stuck);
    }

    /// Returns the cliques of which a process should ask now; none if it is in none of them or it is too early. `processes`
    /// is the number of all that report.
    pub fn ask(&mut self, processes: usize, is_member: impl Fn(u64) -> bool, now: Timestamp) -> Vec<u64> {
        let interval = if self.is_stuck { STUCK_INTERVAL } else { LACKING_INTERVAL };
        let times = u32::try_from(processes / PROCESSES_PER_INTERVAL + 1).unwrap_or(u32::MAX);
        let awaited = if self.is_asking { ANSWER_AWAITED } else { Duration::ZERO };
        let interval = interval.saturating_mul(times).max(awaited);
        let is_early = self.asked_at.is_some_and(|at| now.since(at) < interval);
        if is_early || !self.subjects.iter().any(|hash| is_member(*hash)) {
            return Vec::new();
        }
        (self.asked_at, self.is_asking) = (Some(now), true);
        self.subjects.clone()
    }

    /// Keeps an answer in place of the former one, or a failure in place of the former failure.
    pub fn keep_answer(&mut self, ras: ReportedRas, now: Timestamp) {
        self.is_asking = false;
        let (place, count) = match ras.error.is_empty() {
            true => (&mut self.answer, &mut self.answered),
            false => (&mut self.failure, &mut self.failed),
        };
        *count += 1;
        *place = Some(Arc::new(RasAnswer { ras, came_at: now }));
    }

    /// Forgets the answer and the failure.
    pub fn forget_answer(&mut self) {
        (self.answer, self.failure) = (None, None);
    }

    /// Returns the answer, or else the failure, while it says something about the present.
    pub fn answer_or_failure(&self, now: Timestamp) -> Option<&RasAnswer> {
        let failure = self.failure.as_deref().filter(|failure| now.since(failure.came_at) <= ANSWER_KEPT);
        self.answer(now).or(failure)
    }

    /// Returns the answer, while it says something about the present.
    pub fn answer(&self, now: Timestamp) -> Option<&RasAnswer> {
        self.answer.as_deref().filter(|answer| now.since(answer.came_at) <= ANSWER_KEPT)
    }

    /// Returns what the answer says of a clique with this number of ranks.
    pub fn communicator(&self, hash: u64, ranks: u32, now: Timestamp) -> Option<&RasCommunicator> {
        let mut found = self.answer(now)?.ras.communicators.iter();
        found.find(|it| it.hash == hash && it.ranks == ranks)
    }

    /// Returns the memory of the answer.
    pub fn bytes(&self) -> usize {
        self.answer.iter().chain(&self.failure).map(|answer| answer.ras.bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Timestamp = Timestamp(1_000_000_000);

    fn answer(error: &str) -> ReportedRas {
        ReportedRas { nccl_version: "2.29.1".into(), error: error.into(), communicators: Vec::new() }
    }

    #[test]
    fn one_process_asks_at_a_time_and_only_about_its_own_trouble() {
        let mut questions = RasQuestions::default();
        assert_eq!(questions.ask(4, |_| true, START), [0; 0], "there is no trouble");
        questions.set_subjects(&[5], &[5, 7]);
        assert_eq!(questions.ask(4, |hash| hash == 9, START), [0; 0], "it is in no clique of these");
        assert_eq!(questions.ask(4, |hash| hash == 7, START), [5, 7]);
        let later = |seconds| START.after(Duration::from_secs(seconds));
        assert_eq!(questions.ask(4, |_| true, later(29)), [0; 0], "another process asks");
        assert_eq!(questions.ask(4, |_| true, later(30)), [5, 7], "its answer is lost");
        questions.keep_answer(answer(""), later(31));
        assert_eq!(questions.ask(4, |_| true, later(39)), [0; 0], "it has just been asked");
        assert_eq!(questions.ask(4, |_| true, later(40)), [5, 7]);
        questions.keep_answer(answer(""), later(41));
        questions.set_subjects(&[], &[7]);
        assert_eq!(questions.ask(4, |_| true, later(99)), [0; 0], "a clique that lacks reports may wait");
        assert_eq!(questions.ask(4, |_| true, later(100)), [7]);
        questions.keep_answer(answer(""), later(101));
        questions.set_subjects(&[7], &[]);
        assert_eq!(questions.ask(2_000, |_| true, later(129)), [0; 0], "a large job is asked less often");
        assert_eq!(questions.ask(2_000, |_| true, later(130)), [7]);
    }

    #[test]
    fn the_subjects_are_few_and_an_answer_grows_old() {
        let mut questions = RasQuestions::default();
        let many: Vec<u64> = (0..100).collect();
        questions.set_subjects(&many, &many);
        assert_eq!(questions.ask(4, |_| true, START).len(), RAS_COMMUNICATORS_MAX);
        questions.keep_answer(answer(""), START);
        let later = START.after(ANSWER_KEPT);
        questions.keep_answer(answer("no process listens"), later);
        assert!(questions.answer(later).is_some() && questions.bytes() > 0, "a failure leaves the answer");
        assert_eq!(questions.answer_or_failure(later).map(|it| &*it.ras.error), Some(""));
        let much_later = START.after(ANSWER_KEPT * 2);
        assert!(questions.answer(much_later).is_none());
        assert_eq!(
            questions.answer_or_failure(much_later).map(|it| &*it.ras.error),
            Some("no process listens")
        );
        questions.forget_answer();
        assert_eq!((questions.bytes(), questions.answered, questions.failed), (0, 1, 1));
    }
}
