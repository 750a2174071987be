//! Tests of what a task holds: the store forgets it when the life of the task ends.

use std::time::Duration;

use super::*;

#[test]
fn what_a_life_holds_is_gone_with_it_in_the_task_as_in_the_sum() {
    let world = StoreFixture::with_registered_tasks(2);
    for (task, ahead_us) in [(0, 2000), (1, -2000)] {
        let report = world.encode_report(task, 100 + u64::from(task), |report| {
            report.cliques = Some(wire::CliqueCache { size: 3, ..Default::default() });
            report.totals = Some(wire::EngineTotals { registered_bytes: 5, ..Default::default() });
            report.clock = Some(wire::ClockReading { ahead_us, within_us: 0 });
        });
        assert_eq!(world.accept_encoded_report(&report), Ok(1000));
    }
    let clock = world.transfers_summary_now().clock.map(|clock| clock.ahead_us);
    assert_eq!(clock, Some(2000), "of clocks that are equally far the first, as in the finding");
    world.register_task(0, 777);
    let (view, tasks) =
        (world.transfers_summary_now(), world.board.task_transfers(world.job, &world.task_incarnations()));
    let held: Vec<_> = tasks.iter().map(|it| (it.stale, it.cliques, it.registered_bytes)).collect();
    assert_eq!(held, [(true, 0, 0), (false, 3, 5)]);
    assert_eq!((view.cliques, view.registered_bytes), (3, 5), "the sum of what the tasks hold");
}

#[test]
fn a_lost_gpu_is_lost_until_another_life_reports() {
    let world = StoreFixture::with_registered_tasks(2);
    let lost = |gpu: u32, error: &str| wire::LostGpu { gpu, error: error.to_owned() };
    let accept = |lost_gpus: Vec<wire::LostGpu>| {
        let report = world.encode_report(1, 101, |report| report.lost_gpus = lost_gpus);
        world.accept_encoded_report(&report)
    };
    let list_lost = || -> Vec<(u32, String, Timestamp)> {
        let view = world.board.transfers_of_task(world.job, &world.task_incarnations(), TaskId(1)).unwrap();
        view.lost_gpus.into_iter().map(|lost| (lost.gpu, lost.error, lost.reported_at)).collect()
    };
    assert_eq!(accept(vec![]), Ok(1000));
    assert_eq!(list_lost(), []);
    assert_eq!(accept(vec![lost(3, &format!("an\nerror{}", "x".repeat(1000)))]), Ok(1000));
    let first = list_lost().remove(0);
    assert!(first.1.starts_with("an | errorx") && first.1.len() < 310, "{first:?}");
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(accept(vec![lost(0, "another"), lost(3, &first.1)]), Ok(1000));
    let both = list_lost();
    assert_eq!((both.len(), &both[1]), (2, &first), "the time at which it was first reported stays");
    assert!(both[0].2 > first.2);
    let by_task = world.board.lost_gpus(world.job, &world.task_incarnations());
    let by_task: Vec<_> = by_task.into_iter().map(|(task, lost)| (task, lost.gpu)).collect();
    assert_eq!(by_task, [(TaskId(1), 3)], "that of each task which was reported first");
    assert_eq!(accept(vec![lost(3, &first.1), lost(3, "again")]), Ok(1000));
    assert_eq!(list_lost(), std::slice::from_ref(&first), "each GPU counts once");
    assert!(matches!(
        accept(vec![lost(0, ""); 65]),
        Err(ReportError::TooMany { what: "lost GPUs", most: 64 })
    ));
    world.register_task(1, 777);
    assert_eq!(list_lost(), []);
    assert_eq!(world.board.lost_gpus(world.job, &world.task_incarnations()), []);
}
