//! Tests of behaviour that is Muster's own choice: the delivery of errors, the live set, and restarts.

use prost::Message as _;

use crate::raw::{GENERATION_A, GENERATION_C, PATIENCE, RawClient, gzip, message_with_prefix};
use crate::second_client::{expect_ok, within};
use crate::support::answer::code_name;
use crate::support::{Body, Call, Caller, Client, Generation, MusterServer, Signal};

/// Registers every task of the default job over its own connection.
async fn register_all_tasks(
    server: &MusterServer,
    generation: Generation,
    tasks: i32,
    recoverable: bool,
) -> Vec<(Client, Caller)> {
    let connect = |task| {
        let caller = Caller::new(task, 0x1000 + u64::from(task.unsigned_abs()), 0);
        (Client::new(generation, server.grpc), caller)
    };
    let mut all: Vec<_> = (0..tasks).map(connect).collect();
    let register = |(client, caller): &(Client, Caller)| {
        let call = Call::Register { incarnation: caller.incarnation, recoverable };
        client.start(*caller, call, |_| {})
    };
    let pending: Vec<_> = all.iter().map(register).collect();
    for ((_, caller), pending) in all.iter_mut().zip(pending) {
        let answer = pending.within(PATIENCE).await.expect("all have come");
        let Body::Service(service) = answer.body else { panic!("{answer:?}") };
        caller.service = Some(service);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn polls_are_held_or_cancelled_as_the_job_says() {
    for (arguments, held) in [
        (&["--tasks", "2"][..], true),
        (&["--tasks", "2", "--error-delivery", "cancel"], false),
        (&["--tasks", "2", "--recoverable"], false),
        (&["--tasks", "2", "--recoverable", "--error-delivery", "hold"], true),
    ] {
        let server = MusterServer::patient(&[arguments, &["--log", "error"]].concat());
        let tasks = register_all_tasks(&server, Generation::C, 2, false).await;
        let (client, caller) = &tasks[0];
        let poll = client.start(*caller, Call::PollForError, |_| {});
        // The calls of one connection are processed in order.
        expect_ok(&within(client.ask(caller, &Call::watch(-1))).await);
        if held {
            assert_eq!(poll.answer(), None, "{arguments:?}");
        } else {
            let answer = poll.within(PATIENCE).await.expect("it is answered");
            assert_eq!(code_name(answer.code), "CANCELLED", "{arguments:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_polls_an_error_comes_with_the_next_heartbeat() {
    let server = MusterServer::patient(&["--tasks", "2", "--error-delivery", "cancel", "--log", "error"]);
    let tasks = register_all_tasks(&server, Generation::A, 2, false).await;
    for (client, caller) in &tasks {
        let answer = within(client.ask(caller, &Call::PollForError)).await;
        assert_eq!(code_name(answer.code), "CANCELLED");
    }
    let (client, caller) = &tasks[1];
    expect_ok(&within(client.ask(caller, &Call::report(8, "out of memory"))).await);
    let (client, caller) = &tasks[0];
    let beat = within(client.ask(caller, &Call::Heartbeat { incarnation: caller.incarnation })).await;
    assert!(!beat.is_ok(), "the run has failed, and task 0 must learn of it");
    assert!(beat.message.contains("out of memory"), "{beat:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_living_are_listed_in_ascending_order() {
    use muster::proto::{CoordinatedTask, tensorflow as a, xla::coordination as c};

    let server = MusterServer::patient(&["--tasks", "1", "--log", "error"]);
    let (_, caller) = register_all_tasks(&server, Generation::C, 1, false).await.remove(0);
    let mut raw = RawClient::connect(server.grpc, "default").await;
    let incarnations = Some(c::Incarnations {
        service_incarnation: caller.service.expect("it is registered"),
        ..Default::default()
    });
    let request = c::GetAliveTasksRequest { incarnations, requesting_task_id: 0, task_ids: vec![0] };
    let back = raw.call(&format!("{GENERATION_C}/GetAliveTasks"), &request).await;
    let alive: c::GetAliveTasksResponse = back.decode();
    assert_eq!((alive.alive_task_ids, alive.incarnations), (vec![0], vec![caller.incarnation]));

    let server = MusterServer::patient(&["--tasks", "40", "--log", "error"]);
    let tasks = register_all_tasks(&server, Generation::A, 40, false).await;
    let ids: Vec<i32> = (0..40).rev().collect();
    let others: Vec<_> = tasks
        .iter()
        .skip(1)
        .map(|(client, caller)| client.start(*caller, Call::alive(&ids), |_| {}))
        .collect();
    let task = |task_id| CoordinatedTask { named: false, task_id, recoverable: false };
    let request = a::GetAliveTasksRequest {
        requesting_task: Some(task(0)),
        tasks: ids.iter().copied().map(task).collect(),
    };
    let mut raw = RawClient::connect(server.grpc, "default").await;
    let back = raw.call(&format!("{GENERATION_A}/GetAliveTasks"), &request).await;
    let alive: a::GetAliveTasksResponse = back.decode();
    assert!(alive.alive_tasks.iter().map(|task| task.task_id).eq(0..40), "{alive:?}");
    assert!(alive.incarnations.iter().copied().eq((0..40).map(|n| 0x1000 + n)), "{alive:?}");
    for other in others {
        assert!(other.within(PATIENCE).await.is_some_and(|answer| answer.is_ok()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sets_of_tasks_are_told_apart_by_their_bytes_and_not_by_a_checksum() {
    use muster::proto::xla::coordination as c;

    // CRC-32 stays the same if these are added (XOR) to the bytes of a message, wherever in it.
    const UNNOTICED: [i32; 5] = [0x4d, 0x2d, 0x3d, 0x6d, 0x08];
    let server = MusterServer::patient(&["--tasks", "2", "--log", "error"]);
    let tasks = register_all_tasks(&server, Generation::C, 2, false).await;
    // Tasks 0 and 1 in the middle of ids that the job does not have. Each id is one byte of the request.
    let both: Vec<i32> = [vec![100; 200], vec![1, 2, 3, 4, 5, 0], vec![100; 200]].concat();
    let mut alone = both.clone();
    for (id, change) in alone[200..].iter_mut().zip(UNNOTICED) {
        *id ^= change;
    }
    assert!(alone.contains(&0) && !alone.contains(&1));
    let bytes = |ids: &[i32]| ids.iter().map(|id| u8::try_from(*id).expect("a small id")).collect::<Vec<_>>();
    let checksum = |ids: &[i32]| {
        let mut crc = flate2::Crc::new();
        crc.update(&bytes(ids));
        crc.sum()
    };
    assert_eq!(checksum(&both), checksum(&alone));

    let ask = async |task: i32, ids: &[i32]| {
        let incarnations = Some(c::Incarnations {
            service_incarnation: tasks[0].1.service.expect("it is registered"),
            ..Default::default()
        });
        let request =
            c::GetAliveTasksRequest { incarnations, requesting_task_id: task, task_ids: ids.to_vec() };
        let file = gzip(&request.encode_to_vec());
        let mut raw = RawClient::connect(server.grpc, "default").await;
        let call = raw.request(&format!("{GENERATION_C}/GetAliveTasks")).header("grpc-encoding", "gzip");
        let body = message_with_prefix(1, u32::try_from(file.len()).expect("a short file"), &file);
        let alive: c::GetAliveTasksResponse = raw.send_body(call, body).await.expect("an answer").decode();
        alive.alive_task_ids
    };
    // The first requests make the server know the set; then it knows the requests, and need not inflate them.
    for _ in 0..5 {
        assert_eq!(tokio::join!(ask(0, &both), ask(1, &both)), (vec![0, 1], vec![0, 1]));
    }
    // Task 0 asks about itself alone, so no other task needs to ask.
    assert_eq!(ask(0, &alone).await, [0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_asks_to_be_recoverable_may_come_back() {
    let server = MusterServer::patient(&["--tasks", "2", "--log", "error"]);
    let tasks = register_all_tasks(&server, Generation::A, 2, true).await;
    let (client, caller) = &tasks[1];
    let again = Call::Register { incarnation: 0xBEEF, recoverable: true };
    expect_ok(&within(client.ask(&Caller { incarnation: 0xBEEF, ..*caller }, &again)).await);
    let (client, caller) = &tasks[0];
    expect_ok(&within(client.ask(caller, &Call::Heartbeat { incarnation: caller.incarnation })).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stops_answers_everybody_who_waits_and_polls_in_the_way_that_lets_clients_live() {
    for generation in [Generation::A, Generation::C] {
        let server = MusterServer::patient(&["--tasks", "2", "--log", "error"]);
        let tasks = register_all_tasks(&server, generation, 2, false).await;
        let (client, caller) = &tasks[0];
        let poll = client.start(*caller, Call::PollForError, |_| {});
        let waiting = [Call::get("never"), Call::barrier("b", 0), Call::alive(&[0, 1])]
            .map(|call| client.start(*caller, call, |_| {}));
        // The calls of one connection are processed in order.
        expect_ok(&within(client.ask(caller, &Call::watch(-1))).await);
        server.signal(Signal::TERM);
        let answer = poll.within(PATIENCE).await.expect("it is answered");
        assert_eq!(code_name(answer.code), "CANCELLED", "{answer:?}");
        assert_eq!(answer.payloads.raw, [], "nothing that a client would take for an error of the job");
        for waiting in waiting {
            let answer = waiting.within(PATIENCE).await.expect("it is answered");
            assert!(!answer.is_ok() && !answer.transport, "{answer:?}");
        }
        drop(tasks);
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while server.is_running() {
            assert!(tokio::time::Instant::now() < deadline, "it does not end: {}", server.said());
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }
}
