//! Random transfer reports, as the transfer engine of one incarnation of a task would send them.

use muster::proto::muster::v1::{
    AbortTotals, CliqueCache, ClockReading, Connection, DurationTimes, EngineTotals, Failure, InFlight,
    OutcomeTotals, PairTotals, StageTimes, TransferReport,
};

/// Two of them are unknown to the server and count as one.
const TRANSPORTS: [&str; 6] = ["shm", "pvm", "unix", "tcp", "rdma", "quic"];
const OUTCOMES: [&str; 6] = ["completed", "completed", "stalled", "peer_dead", "deadline", "unheard-of"];
const STAGES: [&str; 7] = ["prepare", "dependencies", "match", "move", "quiesce", "connect", "unheard-of"];
const SIZES: [&str; 4] = ["4KiB", "64KiB", "more", "unheard-of"];
/// Clock offsets and uncertainties. Some are equally far from the server's clock, some within the
/// uncertainty.
const CLOCKS: [(i64, u64); 6] =
    [(2_000_000, 300), (-2_000_000, 300), (1500, 40), (-700, 2000), (0, 0), (5_000_000_000, 1_500_000)];

/// The source of the amounts in a report; sometimes absurd ones.
struct RandomAmounts<'a> {
    random: &'a mut fastrand::Rng,
    absurd: bool,
}

impl RandomAmounts<'_> {
    fn next_amount(&mut self) -> u64 {
        if self.absurd && self.random.u8(..4) == 0 {
            return u64::MAX;
        }
        let bits = self.random.u32(1..36);
        self.random.u64(..1 << bits)
    }

    fn next_small_amount(&mut self) -> u32 {
        if self.absurd { u32::MAX } else { self.random.u32(..40) }
    }

    fn pick_one<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.random.usize(..all.len())]
    }

    fn raise_counter(&mut self, counter: &mut u64) {
        *counter = counter.saturating_add(self.next_amount());
    }

    fn raise_time_histogram(&mut self, counts: &mut Vec<u64>, sum_us: &mut u64) {
        // Sometimes more counts than there are classes.
        let at = self.random.usize(..17);
        if counts.len() <= at {
            counts.resize(at + 1, 0);
        }
        self.raise_counter(&mut counts[at]);
        self.raise_counter(sum_us);
    }
}

/// Returns the row for which `is` holds, and adds a new one if there is none.
fn matching_or_new_row<T>(rows: &mut Vec<T>, is: impl Fn(&T) -> bool, new: T) -> &mut T {
    let at = rows.iter().position(is).unwrap_or_else(|| {
        rows.push(new);
        rows.len() - 1
    });
    &mut rows[at]
}

/// Turns a report into the next one of the same life: counters rise, other values are random.
///
/// An absurd report has the largest possible numbers.
pub fn advance_report(report: &mut TransferReport, tasks: u32, random: &mut fastrand::Rng, absurd: bool) {
    report.sequence += random.u64(1..4);
    let mut amounts = RandomAmounts { random, absurd };
    for _ in 0..amounts.random.usize(..4) {
        let (peer, transport) = (amounts.random.u32(..tasks), amounts.pick_one(&TRANSPORTS));
        let new = PairTotals { peer, transport: transport.into(), ..PairTotals::default() };
        let pair = matching_or_new_row(
            &mut report.pairs,
            |matching_or_new_row| {
                matching_or_new_row.peer == peer && matching_or_new_row.transport == transport
            },
            new,
        );
        amounts.raise_counter(&mut pair.sent_bytes);
        if amounts.random.bool() {
            amounts.raise_counter(&mut pair.received_bytes);
        }
    }
    for _ in 0..amounts.random.usize(..3) {
        let outcome = amounts.pick_one(&OUTCOMES);
        let new = OutcomeTotals { outcome: outcome.into(), launches: 0 };
        let ended = matching_or_new_row(
            &mut report.outcomes,
            |matching_or_new_row| matching_or_new_row.outcome == outcome,
            new,
        );
        ended.launches = ended.launches.saturating_add(amounts.next_small_amount().into());
    }
    if amounts.random.bool() {
        let (stage, transport) = (amounts.pick_one(&STAGES), amounts.pick_one(&TRANSPORTS));
        let new = StageTimes { stage: stage.into(), ..StageTimes::default() };
        let times = matching_or_new_row(
            &mut report.stages,
            |matching_or_new_row| matching_or_new_row.stage == stage,
            new,
        );
        amounts.raise_time_histogram(&mut times.counts, &mut times.sum_us);
        let size = amounts.pick_one(&SIZES);
        let new = DurationTimes {
            transport: transport.into(),
            size_class: size.into(),
            ..DurationTimes::default()
        };
        let is = |row: &DurationTimes| row.transport == transport && row.size_class == size;
        let times = matching_or_new_row(&mut report.durations, is, new);
        // A row without a launch is possible, too.
        if amounts.random.u8(..4) > 0 {
            amounts.raise_time_histogram(&mut times.counts, &mut times.sum_us);
        }
    }
    if amounts.random.u8(..3) == 0 {
        let reason = amounts.pick_one(&OUTCOMES[2..]);
        let new = AbortTotals { reason: reason.into(), connections: 0 };
        amounts.raise_counter(
            &mut matching_or_new_row(
                &mut report.aborts,
                |matching_or_new_row| matching_or_new_row.reason == reason,
                new,
            )
            .connections,
        );
    }
    let cache = report.cliques.get_or_insert_with(CliqueCache::default);
    cache.size = amounts.next_amount();
    for counter in [&mut cache.hits, &mut cache.misses, &mut cache.evictions] {
        amounts.raise_counter(counter);
    }
    let engine = report.totals.get_or_insert_with(EngineTotals::default);
    engine.registered_bytes = amounts.next_amount();
    // An absurd amount, or another one than that of the host's memory.
    engine.registered_device_bytes = match engine.registered_bytes {
        u64::MAX => u64::MAX,
        bytes => bytes / 3,
    };
    for counter in [
        &mut engine.fenced_frames,
        &mut engine.damaged_chunks,
        &mut engine.lanes_lost,
        &mut engine.lanes_made,
        &mut engine.fetch_fallbacks,
    ] {
        amounts.raise_counter(counter);
    }
    report.connections.clear();
    for _ in 0..amounts.random.usize(..4) {
        let (peer, transport) = (amounts.random.u32(..tasks), amounts.pick_one(&TRANSPORTS));
        let (lanes, launches) = (amounts.next_small_amount(), amounts.next_small_amount());
        let transport = transport.to_owned();
        report.connections.push(Connection {
            peer,
            peer_incarnation: 7,
            transport,
            lanes,
            launches,
            ..Connection::default()
        });
    }
    let [latency_bytes, normal_bytes, bulk_bytes] = [(); 3].map(|()| amounts.next_amount());
    report.in_flight = Some(InFlight { latency_bytes, normal_bytes, bulk_bytes });
    if amounts.random.bool() {
        let (ahead_us, within_us) = if absurd { (i64::MIN, 0) } else { amounts.pick_one(&CLOCKS) };
        report.clock = Some(ClockReading { ahead_us, within_us });
    }
    report.failures.clear();
    for _ in 0..amounts.random.usize(..4).saturating_sub(1) {
        let (peer, reason) = (amounts.random.u32(..tasks), amounts.pick_one(&OUTCOMES[2..]).to_owned());
        // Also without a text, and with a wrong clock.
        let at = amounts.pick_one(&[0, 1, u64::MAX]);
        let text = format!("made up with {peer}");
        report.failures.push(Failure { at, peer, reason, text, ..Failure::default() });
    }
}
