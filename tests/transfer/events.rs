//! Tests of the dependencies of a launch: the launch begins when all of them have completed, and fails when one of
//! them fails.

use muster::transfer::{BufferDefinitionEvent, MemoryError, TransferError, TransportChoice};

use crate::cluster::{
    AnyMemory, Cluster, assert_contents, contents, done, eventually, incoming, is_on_gpu, options_on_channel,
    outgoing,
};

const CHOICES: [TransportChoice; 4] =
    [TransportChoice::Auto, TransportChoice::Unix, TransportChoice::Tcp, TransportChoice::Loopback];

#[test]
fn a_buffer_is_filled_after_the_launch_and_sent_when_it_is_defined() {
    for choice in CHOICES {
        let cluster = Cluster::new(2, choice);
        for (round, len) in [100, 9000, 1 << 20].into_iter().enumerate() {
            let round = round as u64;
            let (source, target) = (cluster.empty(0, len), cluster.empty(1, len));
            let (define, defined) = BufferDefinitionEvent::new();
            let (free, is_free) = BufferDefinitionEvent::new();
            let sent = cluster.engines[0].transfer(
                &[defined],
                vec![outgoing(&source, 0, 1, 1)],
                options_on_channel(0),
            );
            let received = cluster.engines[1].transfer(
                &[is_free],
                vec![incoming(&target, 0, 1, 1)],
                options_on_channel(0),
            );
            // Both sides have launched it; until it begins, the program may use the memory.
            source.change(|bytes| bytes.copy_from_slice(&contents(len, round))).unwrap();
            define.complete();
            // To look at memory of a GPU takes so long that the launch would find the buffer in use.
            let is_held = || is_on_gpu() || source.change(|_| ()).is_err();
            eventually("the sender has its memory", || is_held() || sent.outcome().is_some());
            assert!(is_held(), "{choice:?} {len}: {:?}", sent.outcome());
            target.look(|bytes| assert!(bytes.iter().all(|byte| *byte == 0xee), "{choice:?}")).unwrap();
            assert!(sent.outcome().is_none() && received.outcome().is_none());
            free.complete();
            assert_eq!((done(&sent).err(), done(&received).err()), (None, None), "{choice:?} {len}");
            assert_contents(&target, round);
        }
    }
}

#[test]
fn a_dependent_send_starts_when_its_source_has_arrived() {
    for choice in CHOICES {
        let cluster = Cluster::new(3, choice);
        let len = 600_000;
        let (source, middle, end) = (cluster.filled(0, len, 7), cluster.empty(1, len), cluster.empty(2, len));
        let (define, defined) = BufferDefinitionEvent::new();
        // In reverse order: all of them are launched before any byte moves.
        let last = cluster.engines[2].transfer(&[], vec![incoming(&end, 1, 2, 2)], options_on_channel(0));
        let on_the_way =
            cluster.engines[1].transfer(&[defined], vec![outgoing(&middle, 1, 2, 2)], options_on_channel(0));
        let (sent, received) = cluster.send(0, &source, 1, &middle, 1);
        done(&received).unwrap();
        assert!(last.outcome().is_none(), "nobody has said that it is defined");
        define.complete();
        for transfer in [&sent, &on_the_way, &last] {
            done(transfer).unwrap();
        }
        assert_contents(&end, 7);
    }
}

#[test]
fn memory_still_in_use_is_an_error_on_both_sides() {
    let cluster = Cluster::new(2, TransportChoice::Auto);
    let (source, target) = (cluster.filled(0, 5000, 1), cluster.empty(1, 5000));
    let unmet = cluster.engines[0].transfer(&[], vec![incoming(&source, 1, 0, 9)], options_on_channel(1));
    let (define, defined) = BufferDefinitionEvent::new();
    let sent =
        cluster.engines[0].transfer(&[defined], vec![outgoing(&source, 0, 1, 1)], options_on_channel(0));
    let received = cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, 1)], options_on_channel(0));
    // A launch has its memory before it is in flight.
    eventually("the other one has the memory", || cluster.engines[0].launches_in_flight().len() == 2);
    define.complete();
    let error = done(&sent).unwrap_err();
    assert!(matches!(error, TransferError::Memory(MemoryError::Busy { .. })), "{error}");
    let told = done(&received).unwrap_err();
    assert!(
        matches!(&told, TransferError::Cancelled { by, reason } if by.task.0 == 0 && reason.contains("in use"))
    );
    unmet.cancel("enough").wait();
    source.fill(0).unwrap();
}

#[test]
fn an_event_that_fails_or_is_dropped_fails_the_launch_on_both_sides() {
    for choice in CHOICES {
        let cluster = Cluster::new(2, choice);
        let (source, target) = (cluster.filled(0, 9000, 1), cluster.empty(1, 9000));
        let mut key = 0;
        // The source is never defined, or the destination is never free.
        for side in [0, 1] {
            for dropped in [false, true] {
                key += 1;
                let (definer, event) = BufferDefinitionEvent::new();
                let held = [event];
                let on_side = |task: usize| if task == side { &held[..] } else { &[] };
                let specs = [vec![outgoing(&source, 0, 1, key)], vec![incoming(&target, 0, 1, key)]];
                let both: Vec<_> = specs
                    .into_iter()
                    .enumerate()
                    .map(|(task, specs)| {
                        cluster.engines[task].transfer(on_side(task), specs, options_on_channel(0))
                    })
                    .collect();
                assert!(both.iter().all(|transfer| transfer.outcome().is_none()));
                let why = if dropped {
                    drop(definer);
                    "what was to define the buffer is gone"
                } else {
                    definer.fail("the step before it was skipped");
                    "the step before it was skipped"
                };
                assert_eq!(done(&both[side]), Err(TransferError::Dependency(why.to_owned())), "{choice:?}");
                let told = done(&both[1 - side]).unwrap_err();
                assert!(
                    matches!(&told, TransferError::Cancelled { by, reason } if by.task.0 as usize == side && reason.contains(why)),
                    "{choice:?}: {told}"
                );
                target.look(|bytes| assert!(bytes.iter().all(|byte| *byte == 0xee))).unwrap();
            }
        }
        // The sides are in step.
        let (sent, received) = cluster.send(0, &source, 1, &target, 100);
        assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
        assert_contents(&target, 1);
    }
}

#[test]
fn dependents_of_a_dropped_prepared_transfer_fail() {
    let cluster = Cluster::new(2, TransportChoice::Auto);
    let (source, target) = (cluster.filled(0, 5000, 1), cluster.empty(1, 5000));
    let mut prepared =
        cluster.engines[0].prepare(vec![outgoing(&source, 0, 1, 1)], options_on_channel(0)).wait().unwrap();
    let first = prepared.next_launch_handle();
    let sent = prepared.launch(&[]);
    let second = prepared.next_launch_handle();
    drop(prepared);
    assert_eq!(done(&second), Err(TransferError::Dropped));
    // A launched transfer goes on, even if its handles are dropped.
    let received = cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, 1)], options_on_channel(0));
    for transfer in [&first, &sent, &received] {
        done(transfer).unwrap();
    }
    assert_contents(&target, 1);
}
