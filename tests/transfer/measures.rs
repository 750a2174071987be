//! Tests of the measurements that an engine makes of its launches.

use std::time::Duration;

use muster::transfer::{
    BufferDefinitionEvent, LaunchOptions, LaunchStage, TransferEngine, TransferError, TransportChoice,
};

use crate::cluster::{Cluster, PATIENCE, device, done, eventually, incoming, outgoing};

fn count_launches_with_outcome(engine: &TransferEngine, how: &str) -> u64 {
    engine.launch_metrics().outcome_counts().find(|(name, _)| *name == how).map(|(_, count)| count).unwrap()
}

fn count_launches_at_stage(engine: &TransferEngine, stage: LaunchStage) -> u64 {
    engine.launch_metrics().stage_times(stage).counts.iter().sum()
}

fn total_stage_time_is_at_least(engine: &TransferEngine, stage: LaunchStage, time: Duration) -> bool {
    engine.launch_metrics().stage_times(stage).sum_us >= time.as_micros() as u64
}

#[test]
fn launches_are_counted_by_how_they_end_and_timed_by_stage() {
    let cluster = Cluster::new(2, TransportChoice::Auto);
    let (source, target) = (cluster.filled(0, 1 << 20, 1), cluster.empty(1, 1 << 20));
    let [sender, receiver] = &cluster.engines[..] else { panic!("two engines") };
    let (sent, received) = cluster.send(0, &source, 1, &target, 1);
    done(&sent).unwrap();
    done(&received).unwrap();
    for engine in [sender, receiver] {
        assert_eq!(count_launches_with_outcome(engine, "completed"), 1);
        for stage in [LaunchStage::Prepare, LaunchStage::Match, LaunchStage::Move] {
            assert_eq!(count_launches_at_stage(engine, stage), 1, "{stage:?}");
        }
        assert_eq!(
            count_launches_at_stage(engine, LaunchStage::Dependencies)
                + count_launches_at_stage(engine, LaunchStage::Quiesce),
            0
        );
    }

    // One side waits for a dependency; the other one waits for that side.
    let wait = Duration::from_millis(120);
    let (definer, event) = BufferDefinitionEvent::new();
    let sent = sender.transfer(&[event], vec![outgoing(&source, 0, 1, 2)], LaunchOptions::default());
    let received = receiver.transfer(&[], vec![incoming(&target, 0, 1, 2)], LaunchOptions::default());
    std::thread::sleep(wait);
    definer.complete();
    done(&sent).unwrap();
    done(&received).unwrap();
    assert_eq!(count_launches_at_stage(sender, LaunchStage::Dependencies), 1);
    assert!(total_stage_time_is_at_least(sender, LaunchStage::Dependencies, wait / 2));

    // One side launches late.
    let received = receiver.transfer(&[], vec![incoming(&target, 0, 1, 3)], LaunchOptions::default());
    std::thread::sleep(wait);
    let sent = sender.transfer(&[], vec![outgoing(&source, 0, 1, 3)], LaunchOptions::default());
    done(&sent).unwrap();
    done(&received).unwrap();
    assert!(total_stage_time_is_at_least(receiver, LaunchStage::Match, wait / 2));
    assert!(receiver.launch_metrics().take_recent_failures().is_empty());
}

#[test]
fn failures_are_counted_by_reason_and_reported_once_with_peer_and_cause() {
    let cluster = Cluster::new(2, TransportChoice::Auto);
    let (source, target) = (cluster.filled(0, 5000, 1), cluster.empty(1, 5000));
    let (sender, launch_metrics) = (&cluster.engines[0], cluster.engines[0].launch_metrics());
    let (tell, told) = std::sync::mpsc::channel();
    launch_metrics.set_failure_hook(move || tell.send(()).unwrap());

    let (sent, received) = cluster.send(0, &source, 1, &target, 1);
    done(&sent).unwrap();
    done(&received).unwrap();
    let given_up = sender.transfer(&[], vec![outgoing(&source, 0, 1, 2)], LaunchOptions::default());
    assert!(given_up.cancel("no longer wanted").wait_for(PATIENCE));
    told.recv_timeout(PATIENCE).unwrap();
    assert_eq!(
        (count_launches_with_outcome(sender, "cancelled"), count_launches_with_outcome(sender, "completed")),
        (1, 1)
    );
    eventually("the proof is timed", || count_launches_at_stage(sender, LaunchStage::Quiesce) == 1);
    let failures = launch_metrics.take_recent_failures();
    let [failed] = failures.as_slice() else { panic!("{failures:?}") };
    assert_eq!(failed.peer, cluster.engines[1].here().peer_task());
    assert!(matches!(&failed.error, TransferError::Cancelled { reason, .. } if reason == "no longer wanted"));
    assert!(launch_metrics.take_recent_failures().is_empty(), "told once");

    // Requests that fail count too.
    assert!(sender.prepare(Vec::new(), LaunchOptions::default()).wait().is_err());
    let nobody = muster::transfer::TransferSpec::send(
        source.full_span(),
        device(0),
        device(9),
        muster::transfer::TransferKey(1),
    );
    assert!(done(&sender.transfer(&[], vec![nobody], LaunchOptions::default())).is_err());
    assert_eq!(count_launches_with_outcome(sender, "refused"), 2);
    // Transfers that are prepared and dropped were never requested.
    drop(sender.prepare(vec![outgoing(&source, 0, 1, 3)], LaunchOptions::default()).wait().unwrap());
    assert_eq!(count_launches_with_outcome(sender, "dropped"), 0);
    // A bounded number of failures is kept, however many there are.
    for _ in 0..200 {
        assert!(sender.prepare(Vec::new(), LaunchOptions::default()).wait().is_err());
    }
    assert_eq!(
        (launch_metrics.take_recent_failures().len(), count_launches_with_outcome(sender, "refused")),
        (64, 202)
    );
}
