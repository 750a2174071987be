//! A simulated worker that sends transfer reports without moving bytes.

use muster::proto::muster::v1::collectives_client::CollectivesClient;
use muster::proto::muster::v1::transfers_client::TransfersClient;
use muster::proto::muster::v1::{
    AbortTotals, CliqueCache, ClockReading, CollectivesAck, CollectivesReport, Connection, DurationTimes,
    EngineTotals, Failure, InFlight, OutcomeTotals, PairTotals, StageTimes, TransferReport,
    TransferReportAck,
};

use super::Client;

/// The transfer report of one life of a task. Every call of [`Reporter::say`] sends the present content as
/// the next report.
#[derive(Clone)]
pub struct Reporter {
    client: Client,
    /// The report; its counters are totals.
    pub report: TransferReport,
}

impl Reporter {
    /// Returns a reporter for a life of a task, over a connection that may have other users.
    pub fn new(client: &Client, task: u32, incarnation: u64) -> Self {
        let report = TransferReport { task, incarnation, ..TransferReport::default() };
        Self { client: client.clone(), report }
    }

    /// Sends a report of collectives, as NCCL's profiler plug-in does from the process of a task.
    pub async fn report_collectives(
        &self,
        report: CollectivesReport,
    ) -> Result<CollectivesAck, tonic::Status> {
        let mut service = CollectivesClient::new(self.client.channel());
        service.report(report).await.map(tonic::Response::into_inner)
    }

    /// Adds bytes sent to a peer and received from it.
    pub fn move_bytes(&mut self, peer: u32, transport: &str, sent: u64, received: u64) {
        let of = |row: &&mut PairTotals| row.peer == peer && row.transport == transport;
        match self.report.pairs.iter_mut().find(of) {
            Some(row) => {
                row.sent_bytes += sent;
                row.received_bytes += received;
            }
            None => self.report.pairs.push(PairTotals {
                peer,
                transport: transport.into(),
                sent_bytes: sent,
                received_bytes: received,
                ..PairTotals::default()
            }),
        }
    }

    /// Adds ended launches.
    pub fn end(&mut self, outcome: &str, launches: u64) {
        match self.report.outcomes.iter_mut().find(|row| row.outcome == outcome) {
            Some(row) => row.launches += launches,
            None => self.report.outcomes.push(OutcomeTotals { outcome: outcome.into(), launches }),
        }
    }

    /// Sets a connection with launches in progress.
    pub fn connect(&mut self, peer: u32, transport: &str, lanes: u32, launches: u32) {
        let (peer_incarnation, transport) = (u64::from(peer), transport.to_owned());
        self.report.connections.push(Connection {
            peer,
            peer_incarnation,
            transport,
            lanes,
            launches,
            ..Connection::default()
        });
    }

    /// Adds a failed launch, at this time in microseconds since the Unix epoch.
    pub fn fail(&mut self, peer: u32, reason: &str, text: &str, at: u64) {
        self.end(reason, 1);
        self.report.failures.push(Failure {
            at,
            peer,
            reason: reason.into(),
            text: text.into(),
            ..Failure::default()
        });
    }

    /// Sets the other counters of an engine.
    pub fn count(&mut self, hits: u64, fenced_frames: u64) {
        self.report.cliques = Some(CliqueCache { size: 2, hits, misses: 2, evictions: 1 });
        self.report.totals = Some(EngineTotals {
            fenced_frames,
            damaged_chunks: 1,
            lanes_lost: 2,
            lanes_made: 2,
            fetch_fallbacks: 1,
            registered_bytes: 64 << 20,
            registered_device_bytes: 0,
        });
    }

    /// Adds launches that took 50 microseconds for a stage and in total.
    pub fn take_time(&mut self, stage: &str, launches: u64) {
        let (stage, counts, sum_us) = (stage.into(), vec![0, 0, launches], 50 * launches);
        self.report.stages = vec![StageTimes { stage, counts: counts.clone(), sum_us }];
        let (transport, size_class) = ("shm".into(), "64KiB".into());
        self.report.durations = vec![DurationTimes { transport, size_class, counts, sum_us }];
    }

    /// Adds connections that ended for this reason, and sets the bytes that are still to move.
    pub fn lose(&mut self, reason: &str, connections: u64, normal_bytes: u64) {
        self.report.aborts = vec![AbortTotals { reason: reason.into(), connections }];
        self.report.in_flight = Some(InFlight { normal_bytes, ..InFlight::default() });
    }

    /// Sets the offset of its clock, and the uncertainty.
    pub fn show_clock(&mut self, ahead_us: i64, within_us: u64) {
        self.report.clock = Some(ClockReading { ahead_us, within_us });
    }

    /// Sends the next report.
    pub async fn say(&mut self) -> Result<TransferReportAck, tonic::Status> {
        self.report.sequence += 1;
        let mut service = TransfersClient::new(self.client.channel());
        let answer = service.report(self.report.clone()).await;
        self.report.failures.clear();
        answer.map(tonic::Response::into_inner)
    }
}
