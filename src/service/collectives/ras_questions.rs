//! What the service asks RAS, NCCL's own monitoring, and what it was answered.
//!
//! RAS is asked while cliques look stuck or lack reports. One process asks at a time, for the whole job: RAS then asks all
//! processes of the job, which costs each of them a message. Begin at [`RasQuestions::ask`].

use std::sync::Arc;
use std::time::Duration;

use muster_collectives::ras::RasCommunicator;

use super::RAS_COMMUNICATORS_MAX;
use super::parse::ReportedRas;
use crate::coordination::Timestamp;

/// The shortest time between two questions about cliques that look stuck; and about those that only lack reports.
const STUCK_INTERVAL: Duration = Duration::from_secs(10);
const LACKING_INTERVAL: Duration = Duration::from_secs(60);
/// The number of processes up to which these times hold.
const PROCESSES_PER_INTERVAL: usize = 1000;
/// The age from which an answer says nothing about the present. An answer takes up to 20 s.
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
    answer: Option<Arc<RasAnswer>>,
    /// The answers with and without an error.
    pub answered: u64,
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
        let is_early = self.asked_at.is_some_and(|at| now.since(at) < interval.saturating_mul(times));
        if is_early || !self.subjects.iter().any(|hash| is_member(*hash)) {
            return Vec::new();
        }
        self.asked_at = Some(now);
        self.subjects.clone()
    }

    /// Keeps an answer in place of the former one.
    pub fn keep_answer(&mut self, ras: ReportedRas, now: Timestamp) {
        match ras.error.is_empty() {
            true => self.answered += 1,
            false => self.failed += 1,
        }
        self.answer = Some(Arc::new(RasAnswer { ras, came_at: now }));
    }

    /// Forgets the answer.
    pub fn forget_answer(&mut self) {
        self.answer = None;
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
        self.answer.as_ref().map_or(0, |answer| answer.ras.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Timestamp = Timestamp(1_000_000_000);

    #[test]
    fn one_process_asks_at_a_time_and_only_about_its_own_trouble() {
        let mut questions = RasQuestions::default();
        assert_eq!(questions.ask(4, |_| true, START), [0; 0], "there is no trouble");
        questions.set_subjects(&[5], &[5, 7]);
        assert_eq!(questions.ask(4, |hash| hash == 9, START), [0; 0], "it is in no clique of these");
        assert_eq!(questions.ask(4, |hash| hash == 7, START), [5, 7]);
        let later = |seconds| START.after(Duration::from_secs(seconds));
        assert_eq!(questions.ask(4, |_| true, later(9)), [0; 0], "another one asks");
        assert_eq!(questions.ask(4, |_| true, later(10)), [5, 7]);
        questions.set_subjects(&[], &[7]);
        assert_eq!(questions.ask(4, |_| true, later(69)), [0; 0], "a clique that lacks reports may wait");
        assert_eq!(questions.ask(4, |_| true, later(70)), [7]);
        questions.set_subjects(&[7], &[]);
        assert_eq!(questions.ask(2_000, |_| true, later(99)), [0; 0], "a large job is asked less often");
        assert_eq!(questions.ask(2_000, |_| true, later(100)), [7]);
    }

    #[test]
    fn the_subjects_are_few_and_an_answer_grows_old() {
        let mut questions = RasQuestions::default();
        let many: Vec<u64> = (0..100).collect();
        questions.set_subjects(&many, &many);
        assert_eq!(questions.ask(4, |_| true, START).len(), RAS_COMMUNICATORS_MAX);
        let ras =
            ReportedRas { nccl_version: "2.29.1".into(), error: String::new(), communicators: Vec::new() };
        questions.keep_answer(ras, START);
        assert!(questions.answer(START.after(ANSWER_KEPT)).is_some() && questions.bytes() > 0);
        assert!(questions.answer(START.after(ANSWER_KEPT * 2)).is_none());
        questions.forget_answer();
        assert_eq!((questions.bytes(), questions.answered, questions.failed), (0, 1, 0));
    }
}
