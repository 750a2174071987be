//! Tests of calls that crash jaxlib's own service or make it unusable. In Muster they must harm no task, not even a
//! task of the same job.

use crate::second_client::{SecondClient, within};
use crate::support::answer::code_name;
use crate::support::{Answer, Body, Call, Caller, Client, Generation, MusterServer};

struct Attack {
    server: MusterServer,
    second_client: SecondClient,
    caller: Caller,
    clients: [Client; 2],
}

impl Attack {
    /// Opens a client of each generation that is no task, in the second client's job.
    async fn begin() -> Self {
        let server = MusterServer::patient(&["--tasks", "2", "--log", "error"]);
        let witness = SecondClient::register(&server, "default").await;
        let caller = Caller::new(7, 0xBAD, witness.service_incarnation());
        let clients = [Generation::A, Generation::C].map(|generation| Client::new(generation, server.grpc));
        Self { server, second_client: witness, caller, clients }
    }

    /// Makes a call in both generations, after each of which the job must work.
    async fn assert_job_survives_call(&mut self, caller: Caller, call: Call, check: impl Fn(&Answer)) {
        for client in &self.clients {
            let unknown_there = client.generation() == Generation::C
                && matches!(call, Call::TaskStates { .. } | Call::WaitForAllTasks { .. } | Call::Reset);
            let answer = within(client.ask(&caller, &call)).await;
            assert!(!answer.transport, "{call:?} broke the connection: {answer:?}");
            if !unknown_there {
                check(&answer);
            }
            self.second_client.assert_served().await;
        }
        assert!(self.server.is_running());
    }

    async fn assert_refused(&mut self, caller: Caller, call: Call, code: i32) {
        let asked = format!("{call:?}");
        self.assert_job_survives_call(caller, call, |answer| {
            assert_eq!(code_name(answer.code), code_name(code), "{asked}: {answer:?}");
        })
        .await;
    }
}

const INVALID_ARGUMENT: i32 = 3;
const FAILED_PRECONDITION: i32 = 9;
const INTERNAL: i32 = 13;

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_from_the_future_is_answered_at_once() {
    let mut attack = Attack::begin().await;
    for version in [999, i64::MAX, i64::MIN, -1] {
        attack
            .assert_job_survives_call(attack.caller, Call::watch(version), |answer| {
                let Body::States { version, tasks } = &answer.body else { panic!("{answer:?}") };
                assert!(*version >= 0, "the present version is told, not the caller's");
                assert!(tasks.iter().all(|task| task.state == 3), "{tasks:?}");
            })
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_without_an_error_is_refused() {
    let mut attack = Attack::begin().await;
    let victim = Caller { task: 1, ..attack.caller };
    attack.assert_refused(victim, Call::report(0, "no error at all"), INVALID_ARGUMENT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn barriers_with_wrong_beginnings_stay_usable() {
    let mut attack = Attack::begin().await;
    let member = Caller { task: 0, ..*attack.second_client.task(0).1 };
    for counter in [3, -1, i64::MAX, i64::MIN] {
        attack.assert_refused(member, Call::barrier("fresh", counter), INTERNAL).await;
    }
    for counter in [0, 1, -1, i64::MAX, i64::MIN] {
        attack.assert_refused(member, Call::cancel("never begun", counter), FAILED_PRECONDITION).await;
    }
    for id in ["fresh", "never begun"] {
        let met = [0, 1].map(|task| {
            let (client, caller) = attack.second_client.task(task);
            client.start(*caller, Call::barrier(id, 0), |_| {})
        });
        for pending in met {
            let answer = pending.within(crate::raw::PATIENCE).await.expect("both have come");
            assert_eq!(answer.body, Body::Barrier(0), "{answer:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_change_nothing_in_a_job_that_is_not_theirs() {
    let mut attack = Attack::begin().await;
    let (client, member) = attack.second_client.task(0);
    let waiting = client.start(*member, Call::barrier("begun", 0), |_| {});
    for id in [2, 7, -1, i32::MIN, i32::MAX] {
        let stranger = Caller { task: id, ..attack.caller };
        attack.assert_refused(stranger, Call::Shutdown, INTERNAL).await;
        attack.assert_refused(stranger, Call::Reset, INVALID_ARGUMENT).await;
        attack.assert_refused(stranger, Call::cancel("begun", 0), INVALID_ARGUMENT).await;
        attack.assert_refused(stranger, Call::barrier("begun", 0), INVALID_ARGUMENT).await;
        attack.assert_refused(stranger, Call::barrier_of("begun", 0, &[0, id]), INVALID_ARGUMENT).await;
        attack.assert_refused(stranger, Call::barrier("begun by a stranger", 0), INVALID_ARGUMENT).await;
        attack.assert_refused(stranger, Call::PollForError, INVALID_ARGUMENT).await;
        attack.assert_refused(stranger, Call::report(13, "not mine"), INVALID_ARGUMENT).await;
        attack.assert_refused(stranger, Call::Heartbeat { incarnation: 1 }, INVALID_ARGUMENT).await;
        attack.assert_refused(stranger, Call::alive(&[0, 1]), INVALID_ARGUMENT).await;
        attack.assert_refused(stranger, Call::TaskStates { tasks: vec![id] }, INVALID_ARGUMENT).await;
        attack
            .assert_refused(stranger, Call::WaitForAllTasks { devices: vec![vec![1]] }, INVALID_ARGUMENT)
            .await;
        let register = Call::Register { incarnation: 1, recoverable: true };
        attack.assert_refused(stranger, register, INVALID_ARGUMENT).await;
        assert_eq!(waiting.answer(), None, "nobody has disturbed the barrier");
    }
    let (client, other) = attack.second_client.task(1);
    let answer = within(client.ask(other, &Call::barrier("begun", 0))).await;
    assert_eq!(answer.body, Body::Barrier(0), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_has_gone_is_waited_for_again() {
    let attack = Attack::begin().await;
    let (zero, me) = attack.second_client.task(0);
    let [one_call, other_call] = [(); 2].map(|()| zero.start(*me, Call::barrier("b", 0), |_| {}));
    // The first arrival is registered once its repetition replaces it. A client that is still connecting may send them in
    // either order.
    let patience = crate::raw::PATIENCE;
    let (displaced, waiting) = tokio::select! {
        answer = one_call.within(patience) => (answer, &other_call),
        answer = other_call.within(patience) => (answer, &one_call),
    };
    assert_eq!(code_name(displaced.expect("the later call takes its place").code), "CANCELLED");
    waiting.hang_up();
    // Once the service knows that the only caller has gone, a cancellation finds no barrier in progress.
    let (one, other) = attack.second_client.task(1);
    loop {
        let present = within(one.ask(other, &Call::cancel("b", 5))).await;
        if present.message.contains("nobody") {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let waits = one.start(*other, Call::barrier("b", 0), |_| {});
    attack.second_client.assert_served().await;
    assert_eq!(waits.answer(), None, "who has hung up does not count");
    let answer = within(zero.ask(me, &Call::barrier("b", 0))).await;
    assert_eq!(answer.body, Body::Barrier(0));
    assert_eq!(waits.within(crate::raw::PATIENCE).await.expect("both have come").body, Body::Barrier(0));
}
