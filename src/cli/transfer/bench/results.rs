//! Computes and formats the results of the benchmark.
//!
//! Begin at `SizeResult::new`.

use std::fmt;

use serde::Serialize;

use super::protocol::{BenchEngineSetup, BenchMemory, BenchShape};
use crate::sample_range::SampleRange;
use crate::text::format_bytes;
use crate::transfer::{TransportChoice, TransportKind};

/// The throughput of one repetition.
#[derive(Debug)]
pub struct ThroughputSample {
    /// The rate of all pairs together, in 10^9 bytes a second.
    pub rate: f64,
    pub by: TransportKind,
    pub wrong: Option<String>,
}

/// The measurements of one end of a pair in a latency measurement.
#[derive(Debug, Clone)]
pub struct PingPongTimes {
    pub launched: Vec<u64>,
    pub arrived: Vec<u64>,
    /// The time that each call of `launch` took, in nanoseconds.
    pub calls: Vec<u64>,
    /// The CPU time, in nanoseconds.
    pub worked: u64,
    /// The transport that moved most bytes.
    pub by: TransportKind,
    pub wrong: Option<String>,
}

impl PingPongTimes {
    /// Returns the time from the first launch to the last arrival.
    pub fn span_nanos(&self) -> u64 {
        let first = self.launched.first().copied().unwrap_or(0);
        self.arrived.last().copied().unwrap_or(0).saturating_sub(first)
    }
}

/// The latency of one repetition, in microseconds.
#[derive(Debug)]
pub struct LatencySample {
    one_way: Percentiles,
    half_round_trip: Percentiles,
    /// A call of `launch`.
    call: Percentiles,
    /// The CPU time of both ends for each transfer.
    cpu: f64,
    by: TransportKind,
    wrong: Option<String>,
}

#[derive(Debug, Clone, Copy)]
struct Percentiles {
    p50: f64,
    p99: f64,
}

impl Percentiles {
    /// Computes the percentiles of times in nanoseconds.
    fn from_times(mut times: Vec<u64>) -> Self {
        times.sort_unstable();
        let at = |share: f64| {
            let last = times.len().saturating_sub(1);
            times.get((last as f64 * share).round() as usize).copied().unwrap_or(0) as f64 / 1e3
        };
        Self { p50: at(0.5), p99: at(0.99) }
    }
}

impl LatencySample {
    /// Computes the latency from the measurements of both ends. The first rounds are left out, because the
    /// other end may not have been ready.
    pub fn new(near: &PingPongTimes, far: &PingPongTimes, wrong: Option<String>) -> Self {
        const WARMUP_ROUNDS: usize = 2;
        let between = |from: &[u64], to: &[u64]| -> Vec<u64> {
            from.iter().zip(to).skip(WARMUP_ROUNDS).map(|(from, to)| to.saturating_sub(*from)).collect()
        };
        let mut one_way = between(&near.launched, &far.arrived);
        one_way.extend(between(&far.launched, &near.arrived));
        let halves = between(&near.launched, &near.arrived).into_iter().map(|round| round / 2).collect();
        let transfers = near.launched.len() + far.launched.len();
        Self {
            one_way: Percentiles::from_times(one_way),
            half_round_trip: Percentiles::from_times(halves),
            call: Percentiles::from_times([near.calls.as_slice(), far.calls.as_slice()].concat()),
            cpu: (near.worked + far.worked) as f64 / transfers.max(1) as f64 / 1e3,
            by: near.by,
            wrong,
        }
    }
}

/// One repetition of the measurements for one shape.
#[derive(Debug)]
pub struct Repetition {
    pub moved: Option<ThroughputSample>,
    pub delays: LatencySample,
}

/// The time of a preparation, in microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct PrepareTimes {
    prepare_first_us: f64,
    prepare_p50_us: f64,
    prepare_p99_us: f64,
    prepare_max_us: f64,
}

impl PrepareTimes {
    /// Computes the times from those of each sender, in nanoseconds: the first one, and later ones.
    pub fn new(senders: &[(u64, Vec<u64>)]) -> Self {
        let first = senders.iter().map(|sender| sender.0).max().unwrap_or(0);
        let again = senders.first().map(|sender| sender.1.clone()).unwrap_or_default();
        let most = again.iter().copied().max().unwrap_or(0);
        let again = Percentiles::from_times(again);
        Self {
            prepare_first_us: first as f64 / 1e3,
            prepare_p50_us: again.p50,
            prepare_p99_us: again.p99,
            prepare_max_us: most as f64 / 1e3,
        }
    }
}

/// The result for one size.
#[derive(Debug, Serialize)]
pub struct SizeResult {
    /// The transport of the bytes.
    transport: String,
    asked: TransportChoice,
    size_bytes: usize,
    batch: usize,
    pairs: u32,
    in_flight: usize,
    /// The chunks carried checksums.
    checksums: bool,
    lanes: Option<usize>,
    /// Each transfer was requested anew, and received into a buffer that was allocated for it.
    unprepared: bool,
    /// The memory of the buffers.
    memory: BenchMemory,
    repetitions: usize,
    gbytes_per_second: Option<f64>,
    /// One way: from the launch at the sender until the receiver continues.
    p50_us: Option<f64>,
    p99_us: Option<f64>,
    half_round_trip_p50_us: Option<f64>,
    half_round_trip_p99_us: Option<f64>,
    /// The time that a call of `launch` takes.
    launch_p50_us: Option<f64>,
    /// The CPU time of both processes for each transfer of that kind.
    cpu_us: Option<f64>,
    #[serde(flatten)]
    prepares: PrepareTimes,
    /// Every byte was the one that was sent.
    pub verified: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    wrong: Option<String>,
    spread: RepetitionSpreads,
}

#[derive(Debug, Serialize)]
struct RepetitionSpreads {
    gbytes_per_second: Option<SampleRange>,
    p50_us: Option<SampleRange>,
    p99_us: Option<SampleRange>,
    half_round_trip_p50_us: Option<SampleRange>,
    half_round_trip_p99_us: Option<SampleRange>,
    launch_p50_us: Option<SampleRange>,
    cpu_us: Option<SampleRange>,
}

impl SizeResult {
    pub fn new(
        pairs: u32,
        setup: &BenchEngineSetup,
        shape: BenchShape,
        prepares: &PrepareTimes,
        found: &[Repetition],
    ) -> Self {
        let over = |figure: fn(&Repetition) -> Option<f64>| SampleRange::of(found.iter().filter_map(figure));
        let spread = RepetitionSpreads {
            gbytes_per_second: over(|one| one.moved.as_ref().map(|moved| moved.rate)),
            p50_us: over(|one| Some(one.delays.one_way.p50)),
            p99_us: over(|one| Some(one.delays.one_way.p99)),
            half_round_trip_p50_us: over(|one| Some(one.delays.half_round_trip.p50)),
            half_round_trip_p99_us: over(|one| Some(one.delays.half_round_trip.p99)),
            launch_p50_us: over(|one| Some(one.delays.call.p50)),
            cpu_us: over(|one| Some(one.delays.cpu)),
        };
        let wrongs = |one: &Repetition| {
            let moved = one.moved.as_ref().and_then(|moved| moved.wrong.clone());
            moved.or_else(|| one.delays.wrong.clone())
        };
        let wrong = found.iter().find_map(wrongs);
        let median = |spread: Option<SampleRange>| spread.map(|spread| spread.median);
        let by = found.first().map(|one| one.moved.as_ref().map_or(one.delays.by, |moved| moved.by));
        let asked = format!("{:?}", setup.transport).to_lowercase();
        Self {
            transport: by.map_or(asked, |by| by.name().to_owned()),
            asked: setup.transport,
            size_bytes: shape.size,
            batch: shape.batch,
            pairs,
            in_flight: shape.in_flight,
            // Transports within a host have no checksums.
            checksums: setup.checksums && by == Some(TransportKind::Tcp),
            lanes: setup.lanes,
            unprepared: setup.unprepared,
            memory: setup.memory,
            repetitions: found.len(),
            gbytes_per_second: median(spread.gbytes_per_second),
            p50_us: median(spread.p50_us),
            p99_us: median(spread.p99_us),
            half_round_trip_p50_us: median(spread.half_round_trip_p50_us),
            half_round_trip_p99_us: median(spread.half_round_trip_p99_us),
            launch_p50_us: median(spread.launch_p50_us),
            cpu_us: median(spread.cpu_us),
            prepares: *prepares,
            verified: wrong.is_none() && !found.is_empty(),
            wrong,
            spread,
        }
    }
}

/// Returns the heading above the lines of all sizes.
pub fn heading_text(prepares: &PrepareTimes) -> String {
    format!(
        "prepare: first {:.0} us, with the connection there p50 {:.1} us, p99 {:.1} us\n{:>10} {:>6} {:>5} {:>9}  {:>22}  {:>19}  {:>19}  {:>7}\n",
        prepares.prepare_first_us,
        prepares.prepare_p50_us,
        prepares.prepare_p99_us,
        "size",
        "batch",
        "by",
        "in flight",
        "GB/s (least..most)",
        "one way p50/p99 us",
        "half trip p50/p99 us",
        "cpu us",
    )
}

impl fmt::Display for SizeResult {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = self.spread.gbytes_per_second.map_or_else(
            || "-".to_owned(),
            |rate| format!("{:.2} ({:.2}..{:.2})", rate.median, rate.min, rate.max),
        );
        let both = |p50: Option<f64>, p99: Option<f64>| {
            let text = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |us| format!("{us:.1}"));
            format!("{}/{}", text(p50), text(p99))
        };
        writeln!(
            out,
            "{:>10} {:>6} {:>5} {:>9}  {rate:>22}  {:>19}  {:>19}  {:>7}{}",
            format_bytes(self.size_bytes as u64),
            self.batch,
            self.transport,
            self.in_flight,
            both(self.p50_us, self.p99_us),
            both(self.half_round_trip_p50_us, self.half_round_trip_p99_us),
            self.cpu_us.map_or_else(|| "-".to_owned(), |us| format!("{us:.1}")),
            self.wrong.as_ref().map_or_else(String::new, |wrong| format!("  WRONG: {wrong}")),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_are_taken_between_the_ends_and_leave_the_first_rounds_out() {
        // In microseconds: launches at 0, 100, 200 and 300 arrive 4 later, are answered at once, and are back
        // 6 later.
        let times = |offset: u64| -> Vec<u64> { (0..4).map(|n| n * 100_000 + offset * 1000).collect() };
        let by = TransportKind::Shm;
        let calls = vec![2000; 4];
        let mut near = PingPongTimes {
            launched: times(0),
            arrived: times(10),
            calls: calls.clone(),
            worked: 10_000,
            by,
            wrong: None,
        };
        let far =
            PingPongTimes { launched: times(4), arrived: times(4), calls, worked: 6_000, by, wrong: None };
        near.arrived[0] = 90_000;
        let delays = LatencySample::new(&near, &far, None);
        assert!((delays.half_round_trip.p50 - 5.0).abs() < 1e-9);
        assert!((delays.half_round_trip.p99 - 5.0).abs() < 1e-9, "the first round was slow");
        assert!((delays.one_way.p99 - 6.0).abs() < 1e-9);
        assert!((delays.call.p50 - 2.0).abs() < 1e-9);
        assert!((delays.cpu - 2.0).abs() < 1e-9, "16 us for 8 transfers");
    }

    #[test]
    fn an_error_in_one_repetition_is_reported() {
        let certificates = crate::cli::certificates::TransferCertificateArgs::default();
        let setup = BenchEngineSetup {
            transport: TransportChoice::Tcp,
            fabric: None,
            cliques: crate::transfer::CliqueChoice::Off,
            lanes: None,
            spin: None,
            checksums: true,
            unprepared: false,
            memory: BenchMemory::Host,
            certificates,
        };
        let shape = BenchShape { size: 4096, batch: 1, in_flight: 2 };
        let prepares = PrepareTimes::new(&[(5000, vec![1000, 2000, 3000])]);
        let by = TransportKind::Tcp;
        let one = |rate, wrong: Option<&str>| Repetition {
            moved: Some(ThroughputSample { rate, by, wrong: wrong.map(str::to_owned) }),
            delays: LatencySample {
                one_way: Percentiles::from_times(vec![1000]),
                half_round_trip: Percentiles::from_times(vec![1000]),
                call: Percentiles::from_times(vec![100]),
                cpu: 1.0,
                by,
                wrong: None,
            },
        };
        let good = SizeResult::new(1, &setup, shape, &prepares, &[one(1.0, None), one(3.0, None)]);
        assert!(good.verified && good.gbytes_per_second == Some(2.0));
        let bad = SizeResult::new(1, &setup, shape, &prepares, &[one(1.0, None), one(3.0, Some("byte 3"))]);
        assert!(!bad.verified);
        assert!(bad.to_string().contains("byte 3"));
        assert!(!SizeResult::new(1, &setup, shape, &prepares, &[]).verified, "nothing was looked at");
    }
}
