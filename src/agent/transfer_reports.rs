//! Reports transfers to the service about once a second, and when the engine ends.
//!
//! The transfer engine measures the transfers, `report_state.rs` makes a report of the measurements, and this module
//! sends the report. Begin at `report_periodically`.

use std::sync::Arc;
use std::time::Duration;

use tonic::Code;
use tonic::transport::Channel;

use super::engine_host::EngineHost;
use super::report_state::with_locked_report_state;
use super::stack_answers;
use crate::clock;
use crate::coordination::Timestamp;
use crate::proto::muster::v1::transfers_client::TransfersClient;

/// The interval of reports, unless the service sets another.
const INTERVAL: Duration = Duration::from_secs(1);
/// The bounds of the interval that the service may set.
const INTERVAL_BOUNDS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
/// The pause before the next attempt at a service that accepts no reports.
pub(super) const UNSUPPORTED_PAUSE: Duration = Duration::from_secs(60);
/// The timeout of the last report.
const FINAL_REPORT_TIMEOUT: Duration = Duration::from_secs(1);
/// The timeout of a report.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the pause before the next report of any kind that the service asks for, within bounds.
pub(crate) fn asked_report_interval(interval_ms: u32) -> Duration {
    Duration::from_millis(u64::from(interval_ms)).clamp(INTERVAL_BOUNDS.0, INTERVAL_BOUNDS.1)
}

/// Reports until the worker ends.
pub(super) async fn report_periodically(host: Arc<EngineHost>, channel: Channel) {
    loop {
        let pause = send_report(&host, channel.clone()).await;
        let hurry = host.report_soon.notified();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // A failure is reported soon, but many of them in one report.
            () = hurry => tokio::time::sleep(INTERVAL_BOUNDS.0.min(pause)).await,
        }
    }
}

/// Sends the last report. A task that has left cannot report.
pub(super) async fn send_final_report(host: &EngineHost, channel: &Channel) {
    let report = send_report(host, channel.clone());
    let _told = tokio::time::timeout(FINAL_REPORT_TIMEOUT, report).await;
}

/// Reports once; returns the pause before the next report.
async fn send_report(host: &EngineHost, channel: Channel) -> Duration {
    let (report, told) = with_locked_report_state(&host.report_state, |tally| {
        let report = tally.next_report(&host.engine, host.config.host_checks.get());
        (report, tally.confirmed + tally.failures.len() as u64)
    });
    let stacks_channel = channel.clone();
    let mut client = TransfersClient::new(channel);
    let (asked, began) = (clock::wall_time(), clock::monotonic());
    let why = match tokio::time::timeout(CALL_TIMEOUT, client.report(report)).await {
        Ok(Ok(answer)) => {
            let (answer, took) = (answer.into_inner(), began.elapsed());
            with_locked_report_state(&host.report_state, |tally| {
                tally.remove_confirmed_failures(told);
                // A service that does not state its time sends 0.
                if answer.now_us > 0 {
                    tally.clock.add_sample(asked, took, Timestamp(answer.now_us));
                }
            });
            stack_answers::answer_request(host, stacks_channel, answer.stacks_request).await;
            return asked_report_interval(answer.interval_ms);
        }
        Ok(Err(status)) if status.code() == Code::Unimplemented => return UNSUPPORTED_PAUSE,
        Ok(Err(status)) => status.to_string(),
        Err(_) => "no answer in time".to_owned(),
    };
    tracing::debug!(why, "a report of transfers was not taken");
    INTERVAL
}
