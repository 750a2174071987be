//! The state of the plug-in in a process: its record, and the events that NCCL is asked for. Begin at [`plugin_state`].

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};

use muster::agent::CollectiveReporter;
use muster_collectives::{NewCommunicator, Record, RecordFolder};
use tokio::runtime::{Builder, Runtime};

use crate::abi::{COLLECTIVE, KERNEL_CHANNEL, POINT_TO_POINT};

/// When NCCL is asked for the times on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TimingChoice {
    /// While the service wants them.
    WhenAsked,
    Always,
    Never,
}

impl TimingChoice {
    /// Reads `MUSTER_NCCL_TIMING`. Another word than the three counts as the default, and is told.
    fn from_environment() -> (Self, Option<String>) {
        match std::env::var("MUSTER_NCCL_TIMING").unwrap_or_default().as_str() {
            "" | "auto" => (Self::WhenAsked, None),
            "always" => (Self::Always, None),
            "never" => (Self::Never, None),
            other => {
                let text =
                    format!("MUSTER_NCCL_TIMING is {other:?}, and not auto, always or never: auto is used");
                (Self::WhenAsked, Some(text))
            }
        }
    }
}

/// The number in which NCCL reads the events that the process wants. There is one for all communicators, in NCCL's memory.
struct EventMask {
    /// Its address; 0 while there is no communicator.
    address: usize,
    communicators: usize,
}

/// The state of the plug-in.
pub(crate) struct PluginState {
    record: Option<Record>,
    choice: TimingChoice,
    /// Whether NCCL is asked for the times on the GPU now.
    is_timed: AtomicBool,
    mask: Mutex<EventMask>,
    /// The notes for people, in NCCL's log.
    notes: Vec<String>,
}

impl PluginState {
    fn start() -> Self {
        let (choice, complaint) = TimingChoice::from_environment();
        let mut notes = Vec::from_iter(complaint);
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| error.to_string());
        let reporter = runtime.and_then(|runtime| {
            let reporter = {
                let _context = runtime.enter();
                CollectiveReporter::from_environment().map_err(|error| error.to_string())?
            };
            Ok((runtime, reporter))
        });
        let (job, task) = reporter.as_ref().map_or((None, None), |(_, found)| (found.job(), found.task()));
        let folder = RecordFolder::of_this_user();
        let (record, place) = match folder.start_record(job, task) {
            Ok(record) => (Some(record), folder.path().display().to_string()),
            Err(error) => {
                notes.push(format!("no other process can read the record of this one: {error}"));
                (Record::in_memory(job, task).ok(), "the memory of this process".to_owned())
            }
        };
        match reporter {
            Ok((runtime, reporter)) => {
                notes.push(format!("collectives are reported to {}", reporter.service()));
                if record.is_some() {
                    start_reporting_thread(runtime, reporter);
                }
            }
            Err(error) => {
                notes.push(format!("collectives are recorded in {place}, and not reported: {error}"));
            }
        }
        let is_timed = AtomicBool::new(choice == TimingChoice::Always);
        let mask = Mutex::new(EventMask { address: 0, communicators: 0 });
        Self { record, choice, is_timed, mask, notes }
    }

    /// Returns the record, if there is one.
    pub(crate) fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    /// Returns whether NCCL is asked for the times on the GPU.
    pub(crate) fn is_timed(&self) -> bool {
        self.is_timed.load(Relaxed)
    }

    /// Returns what a person should know.
    pub(crate) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Opens a communicator, and asks NCCL for events. Returns the index of its slot.
    pub(crate) fn open_communicator(&self, new: &NewCommunicator<'_>, mask: *mut c_int) -> Option<usize> {
        let record = self.record.as_ref()?;
        let slot = record.open_communicator(new)?;
        let mut own = self.mask.lock().unwrap_or_else(PoisonError::into_inner);
        own.communicators += 1;
        own.address = mask as usize;
        self.write_mask(&own);
        Some(slot)
    }

    /// Ends a communicator.
    pub(crate) fn end_communicator(&self, slot: usize) {
        let Some(record) = &self.record else { return };
        record.end_communicator(slot);
        let mut own = self.mask.lock().unwrap_or_else(PoisonError::into_inner);
        own.communicators = own.communicators.saturating_sub(1);
        if own.communicators == 0 {
            // NCCL may be unloaded.
            own.address = 0;
        }
    }

    /// Asks NCCL for the times on the GPU, or no longer, as the service wants it.
    pub(crate) fn set_timing(&self, wanted: bool) {
        let is_timed = match self.choice {
            TimingChoice::WhenAsked => wanted,
            TimingChoice::Always => true,
            TimingChoice::Never => false,
        };
        let own = self.mask.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_timed.store(is_timed, Relaxed);
        self.write_mask(&own);
    }

    fn write_mask(&self, own: &EventMask) {
        let is_timed = self.is_timed();
        let times = if is_timed { KERNEL_CHANNEL } else { 0 };
        // The bits are small.
        let mask = (COLLECTIVE | POINT_TO_POINT | times) as c_int;
        if let Some(record) = &self.record {
            record.set_timed(is_timed);
        }
        if own.address != 0 {
            // SAFETY: NCCL passed the address of a number that lives as long as it has communicators, and has some now. NCCL
            // reads it without order from any thread, so the write is an atomic one.
            #[expect(unsafe_code, reason = "a number of NCCL")]
            unsafe {
                std::sync::atomic::AtomicI32::from_ptr(own.address as *mut c_int).store(mask, Relaxed);
            }
        }
    }
}

/// Returns the state of this process, which the first call starts.
pub(crate) fn plugin_state() -> &'static PluginState {
    static STATE: OnceLock<PluginState> = OnceLock::new();
    STATE.get_or_init(PluginState::start)
}

/// Starts the thread that reports the record to the service, until the process ends. Without a thread, the process only
/// writes its record.
fn start_reporting_thread(runtime: Runtime, reporter: CollectiveReporter) {
    let run = move || {
        // The state is being made by the thread that starts this one; this waits for it.
        let state = plugin_state();
        if let Some(record) = state.record() {
            runtime.block_on(reporter.report_periodically(record, |wanted| state.set_timing(wanted)));
        }
    };
    let _ = std::thread::Builder::new().name("muster-nccl".to_owned()).spawn(run);
}
