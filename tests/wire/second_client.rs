//! A well-behaved job, by which tests check that a server is unharmed: the job must still work.

use std::sync::atomic::{AtomicI64, Ordering};

use crate::raw::PATIENCE;
use crate::support::{Answer, Body, Call, Caller, Client, Generation, MusterServer};

/// The two tasks of a well-behaved job; one speaks generation A, the other C.
pub struct SecondClient {
    tasks: [(Client, Caller); 2],
    rounds: AtomicI64,
}

impl SecondClient {
    /// Registers both tasks of the job.
    pub async fn register(server: &MusterServer, job: &str) -> Self {
        let authority = format!("{job}.test:8476");
        let client = |generation| Client::to_authority(generation, server.grpc, Some(&authority));
        let tasks = [
            (client(Generation::A), Caller::new(0, 0xAAAA, 0)),
            (client(Generation::C), Caller::new(1, 0xCCCC, 0)),
        ];
        let mut witness = Self { tasks, rounds: AtomicI64::new(0) };
        let [a, c] = witness.register_both().await;
        let (Body::Service(service), Body::Service(other)) = (a.body, c.body) else {
            panic!("both register");
        };
        assert_eq!(service, other, "both are in one run");
        witness.tasks.iter_mut().for_each(|(_, caller)| caller.service = Some(service));
        witness.assert_served().await;
        witness
    }

    /// Returns the service incarnation of the run.
    pub fn service_incarnation(&self) -> u64 {
        self.tasks[0].1.service.expect("it is registered")
    }

    /// Returns a task and its client, for calls that misbehave.
    pub fn task(&self, task: usize) -> (&Client, &Caller) {
        let (client, caller) = &self.tasks[task];
        (client, caller)
    }

    /// Registers again, passes a barrier, writes and reads; all of it must succeed.
    pub async fn assert_served(&self) {
        let round = self.rounds.fetch_add(1, Ordering::SeqCst);
        for answer in self.register_both().await {
            assert!(answer.is_ok(), "registration of round {round}: {answer:?}");
        }
        let met = self.ask_both(&Call::barrier("the witness's own barrier", round)).await;
        assert!(met.iter().all(|answer| answer.body == Body::Barrier(round)), "round {round}: {met:?}");
        let [(zero, me), (one, other)] = &self.tasks;
        let key = format!("witness/{round}");
        let wait = one.start(*other, Call::get(&key), |_| {});
        expect_ok(&within(zero.ask(me, &Call::insert(&key, "here"))).await);
        let got = wait.within(PATIENCE).await.expect("the value is there");
        assert_eq!(got.body, Body::Value { key: key.clone(), value: b"here".to_vec() });
        expect_ok(&within(one.ask(other, &Call::delete(&key))).await);
        for (client, caller) in &self.tasks {
            let beat = Call::Heartbeat { incarnation: caller.incarnation };
            expect_ok(&within(client.ask(caller, &beat)).await);
        }
    }

    async fn register_both(&self) -> [Answer; 2] {
        let ask = |place: usize| {
            let (client, caller) = &self.tasks[place];
            let call = Call::Register { incarnation: caller.incarnation, recoverable: false };
            async move { within(client.ask(caller, &call)).await }
        };
        <[Answer; 2]>::from(tokio::join!(ask(0), ask(1)))
    }

    async fn ask_both(&self, call: &Call) -> [Answer; 2] {
        let [(zero, me), (one, other)] = &self.tasks;
        <[Answer; 2]>::from(tokio::join!(within(zero.ask(me, call)), within(one.ask(other, call))))
    }
}

/// Returns an answer, which must come in time.
pub async fn within(answer: impl Future<Output = Answer>) -> Answer {
    tokio::time::timeout(PATIENCE, answer).await.expect("the call is answered")
}

pub fn expect_ok(answer: &Answer) {
    assert!(answer.is_ok(), "{answer:?}");
}
