//! Tests of well-formed calls with invalid content. Each gets a typed error or an ordinary answer, and no other
//! client is harmed.

use crate::second_client::{SecondClient, expect_ok, within};
use crate::support::answer::code_name;
use crate::support::{Answer, Body, Call, Caller, Client, Generation, MusterServer};

const RESOURCE_EXHAUSTED: i32 = 8;

/// A server with the second client's job and another one of three tasks, the target.
struct CallFixture {
    server: MusterServer,
    second_client: SecondClient,
}

impl CallFixture {
    async fn start() -> Self {
        let server = MusterServer::patient(&["--job", "witness=2", "--job", "target=3", "--log", "error"]);
        let witness = SecondClient::register(&server, "witness").await;
        Self { server, second_client: witness }
    }

    fn client(&self, generation: Generation) -> Client {
        Client::to_authority(generation, self.server.grpc, Some("target.test:1"))
    }

    /// Returns the three registered tasks of the target job.
    async fn register_target_tasks(&self, generation: Generation) -> Vec<(Client, Caller)> {
        let client = self.client(generation);
        let call = |task: i32| (client.clone(), Caller::new(task, 0x100 + u64::from(task.unsigned_abs()), 0));
        let mut tasks = [0, 1, 2].map(call);
        let pending = tasks.clone().map(|(client, caller)| {
            let call = Call::Register { incarnation: caller.incarnation, recoverable: false };
            client.start(caller, call, |_| {})
        });
        for ((_, caller), pending) in tasks.iter_mut().zip(pending) {
            let answer = pending.within(crate::raw::PATIENCE).await.expect("all have come");
            let Body::Service(service) = answer.body else { panic!("{answer:?}") };
            caller.service = Some(service);
        }
        tasks.into()
    }
}

async fn ask(task: &(Client, Caller), call: Call) -> Answer {
    let answer = within(task.0.ask(&task.1, &call)).await;
    assert!(!answer.transport, "no answer but a broken connection: {answer:?}");
    answer
}

fn assert_code(answer: &Answer, code: i32) {
    assert_eq!(code_name(answer.code), code_name(code), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_beyond_all_measure_are_refused_by_every_call() {
    let rig = CallFixture::start().await;
    let long = "k".repeat(10 << 20);
    for generation in [Generation::A, Generation::C] {
        let tasks = rig.register_target_tasks(generation).await;
        let calls = [
            Call::insert(&long, "v"),
            Call::overwrite(&long, "v"),
            Call::get(&long),
            Call::try_get(&long),
            Call::increment(&long, 1),
            Call::list(&long),
            Call::delete(&long),
            Call::barrier(&long, 0),
            Call::cancel(&long, 0),
        ];
        for call in calls {
            // An empty directory is no error.
            let harmless = matches!(call, Call::List { .. } | Call::Delete { .. });
            let answer = ask(&tasks[0], call).await;
            assert!(harmless || !answer.is_ok(), "such a key is not taken");
            assert!(answer.message.len() < 4096, "the answer does not repeat it");
            rig.second_client.assert_served().await;
        }
        assert_code(&ask(&tasks[0], Call::insert(&long, "v")).await, RESOURCE_EXHAUSTED);
        assert_code(&ask(&tasks[0], Call::barrier(&long, 0)).await, RESOURCE_EXHAUSTED);
        // A key of the greatest length is a key like others.
        expect_ok(&ask(&tasks[0], Call::overwrite("", "empty")).await);
        assert!(
            matches!(ask(&tasks[1], Call::get("///")).await.body, Body::Value { value, .. } if value == b"empty")
        );
    }
    rig.second_client.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn counters_and_timeouts_at_the_ends_of_their_range_harm_their_caller_only() {
    let rig = CallFixture::start().await;
    let tasks = rig.register_target_tasks(Generation::C).await;
    for counter in [i64::MIN, -1, 1, i64::MAX - 1, i64::MAX] {
        let answer = ask(&tasks[0], Call::barrier("unused", counter)).await;
        assert_eq!(code_name(answer.code), "INTERNAL", "{answer:?}");
        let answer = ask(&tasks[0], Call::cancel("unused", counter)).await;
        assert_eq!(code_name(answer.code), "FAILED_PRECONDITION", "{answer:?}");
    }
    // An endless timeout, and timeouts that end before they begin.
    let waits = tasks[0].0.start(tasks[0].1, Call::barrier("endless", 0).within_ms(i64::MAX), |_| {});
    for ms in [i64::MIN, -1, 0] {
        let answer = ask(&tasks[1], Call::barrier(&format!("none {ms}"), 0).within_ms(ms)).await;
        assert_eq!(code_name(answer.code), "DEADLINE_EXCEEDED", "{answer:?}");
    }
    rig.second_client.assert_served().await;
    assert_eq!(waits.answer(), None);
    let other = tasks[1].0.start(tasks[1].1, Call::barrier("endless", 0), |_| {});
    assert_eq!(ask(&tasks[2], Call::barrier("endless", 0)).await.body, Body::Barrier(0));
    assert!(other.within(crate::raw::PATIENCE).await.is_some_and(|answer| answer.is_ok()));
    assert!(waits.within(crate::raw::PATIENCE).await.is_some_and(|answer| answer.is_ok()));
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_of_tasks_beyond_all_measure_are_taken_or_refused_but_not_suffered() {
    let rig = CallFixture::start().await;
    for generation in [Generation::A, Generation::C] {
        let tasks = rig.register_target_tasks(generation).await;
        let many: Vec<i32> = (-200_000..200_000).rev().collect();
        let same = vec![1; 300_000];
        for list in [many, same] {
            assert_eq!(
                code_name(ask(&tasks[0], Call::barrier_of("b", 0, &list)).await.code),
                "INVALID_ARGUMENT"
            );
            let alive = Call::alive(&list);
            // The caller must be in the set; then the request is valid.
            let pending = tasks[0].0.start(tasks[0].1, alive, |_| {});
            rig.second_client.assert_served().await;
            pending.hang_up();
            if generation == Generation::A {
                let answer = ask(&tasks[0], Call::TaskStates { tasks: list }).await;
                assert!(answer.code == 3 || answer.code == 8 || answer.is_ok(), "{}", code_name(answer.code));
            }
        }
        rig.second_client.assert_served().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn counting_stops_at_the_ends_of_the_range() {
    let rig = CallFixture::start().await;
    let tasks = rig.register_target_tasks(Generation::C).await;
    expect_ok(&ask(&tasks[0], Call::increment("n", i64::MAX)).await);
    let beyond = ask(&tasks[0], Call::increment("n", 1)).await;
    assert!(!beyond.is_ok(), "there is no such number: {beyond:?}");
    assert!(beyond.payloads.service_error.is_some(), "the service says so itself");
    let kept = ask(&tasks[0], Call::try_get("n")).await;
    assert!(matches!(kept.body, Body::Value { value, .. } if value == i64::MAX.to_string().as_bytes()));
    expect_ok(&ask(&tasks[0], Call::increment("m", i64::MIN)).await);
    assert!(!ask(&tasks[0], Call::increment("m", -1)).await.is_ok());
    rig.second_client.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_overlong_error_report_is_truncated() {
    let rig = CallFixture::start().await;
    let tasks = rig.register_target_tasks(Generation::A).await;
    let poll = tasks[0].0.start(tasks[0].1, Call::PollForError, |_| {});
    let novel = "Call me Ishmael. ".repeat(1 << 18);
    expect_ok(&ask(&tasks[1], Call::report(10, &novel)).await);
    let told = poll.within(crate::raw::PATIENCE).await.expect("the error is told");
    assert_eq!(code_name(told.code), "ABORTED");
    // Clients accept 16 KiB of headers, in which a message is percent-encoded.
    assert!(
        told.message.len() <= 3072 + 32 && told.message.ends_with("[truncated]"),
        "{}",
        told.message.len()
    );
    rig.second_client.assert_served().await;
}
