//! The plug-in of one communicator, and the mask of the process.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};
use std::sync::{Arc, PoisonError, RwLock};

use super::Handle;
use super::descriptor::{EventDescriptor, bits};
use super::plugin::Plugin;
use super::table::{InitV4, InitV5};
use crate::counters::{Counter, CounterGuard};
use crate::settings::Setting;

/// The events that the plug-ins of this process want. Each `init` gets its address, and may write to it at any time.
static MASK: AtomicI32 = AtomicI32::new(0);

/// The states of an event.
pub mod states {
    pub const KERNEL_CHANNEL_STOP: i32 = 22;
    pub const GROUP_API_START_STOP: i32 = 23;
    pub const GROUP_API_END_START: i32 = 24;
}

/// Returns the mask.
pub fn event_mask() -> c_int {
    MASK.load(SeqCst)
}

/// A plug-in after its `init` for one communicator.
#[derive(Debug)]
pub struct ProfilerContext {
    plugin: Arc<Plugin>,
    /// The context from `init`.
    context: usize,
    _guard: CounterGuard,
}

impl ProfilerContext {
    /// Loads the plug-in and calls its `init`. If that fails, the communicator has no plug-in.
    fn init(hash: u64, rank: usize, ranks: usize) -> Option<Self> {
        /// All ranks are on this host.
        const NODES: c_int = 1;
        let plugin = Plugin::of_environment()?;
        let (rank, ranks) = (rank as c_int, ranks as c_int);
        let (mut context, init) = (std::ptr::null_mut(), plugin.table().init);
        let to = &raw mut context;
        let name = std::ptr::null();
        // SAFETY: the type of `init` is that of the table's version. The places live until the call returns, the mask forever.
        let status = unsafe {
            if plugin.version == 4 {
                let init = transmute::<*const c_void, InitV4>(init);
                init(to, MASK.as_ptr(), name, hash, NODES, ranks, rank, log)
            } else {
                let init = transmute::<*const c_void, InitV5>(init);
                init(to, hash, MASK.as_ptr(), name, NODES, ranks, rank, log)
            }
        };
        let guard = Counter::NcclProfilers.count_while_guard_lives();
        (status == 0).then(|| Self { plugin, context: context as usize, _guard: guard })
    }

    /// Starts an event. The plug-in writes the handle, or leaves the place as it is.
    pub fn start(&self, descriptor: EventDescriptor, handle: &mut Handle) {
        const UNKNOWN_IN_V4: u64 =
            (bits::GROUP_API | bits::COLL_API | bits::P2P_API | bits::KERNEL_LAUNCH) as u64;
        let mut descriptor = descriptor;
        if self.plugin.version == 4 {
            if descriptor.kind & UNKNOWN_IN_V4 != 0 {
                return;
            }
            // The only parent in v4 is Group, and no field names it again.
            let group = match descriptor.kind as c_int {
                // SAFETY: the kind says which fields were written.
                bits::COLL => Some(unsafe { &mut descriptor.fields.coll.parent_group }),
                // SAFETY: the same.
                bits::P2P => Some(unsafe { &mut descriptor.fields.p2p.parent_group }),
                _ => None,
            };
            if let Some(group) = group {
                descriptor.parent = std::mem::take(group);
            }
        }
        descriptor.cut_to(self.plugin.version);
        let mut place = *handle as *mut c_void;
        // SAFETY: the place and the descriptor live until the call returns.
        unsafe {
            (self.plugin.table().start_event)(
                self.context as *mut c_void,
                &raw mut place,
                &raw mut descriptor,
            )
        };
        *handle = place as Handle;
    }

    /// Stops an event, unless its handle is null.
    pub fn stop(&self, handle: Handle) {
        if handle != 0 {
            // SAFETY: the plug-in gave the handle.
            unsafe { (self.plugin.table().stop_event)(handle as *mut c_void) };
        }
    }

    /// Tells the state of an event, unless its handle is null. A state without arguments has a null pointer.
    pub fn record_state(&self, handle: Handle, state: c_int, argument: Option<u64>) {
        let mut argument = argument;
        let argument = argument.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
        if handle != 0 && (self.plugin.version > 4 || state == states::KERNEL_CHANNEL_STOP) {
            // SAFETY: the plug-in gave the handle, and the argument lives until the call returns.
            unsafe { (self.plugin.table().record_event_state)(handle as *mut c_void, state, argument) };
        }
    }
}

impl Drop for ProfilerContext {
    fn drop(&mut self) {
        if self.context != 0 {
            // SAFETY: the plug-in gave the context, and gets no other call with it any more.
            unsafe { (self.plugin.table().finalize)(self.context as *mut c_void) };
        }
    }
}

/// The stages of a communicator's plug-in.
#[derive(Debug, Default)]
enum SlotState {
    #[default]
    BeforeInit,
    Active(ProfilerContext),
    /// There is none, or the communicator has ended.
    Inactive,
}

/// The place of a communicator's plug-in. It outlives the plug-in, since streams may still have work of the communicator.
#[derive(Debug, Default)]
pub struct ProfilerSlot(RwLock<SlotState>);

impl ProfilerSlot {
    /// Calls `init` for a communicator whose ranks have met, unless the communicator has ended meanwhile.
    pub fn init(&self, hash: u64, rank: usize, ranks: usize) {
        let mut state = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, SlotState::BeforeInit) {
            let context = ProfilerContext::init(hash, rank, ranks);
            *state = context.map_or(SlotState::Inactive, SlotState::Active);
        }
    }

    /// Waits until no call of the plug-in is under way for this communicator, and calls `finalize`.
    pub fn finalize(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = SlotState::Inactive;
    }

    /// Calls the plug-in, if there is one. A body must not use the slot again.
    pub fn with<T>(&self, body: impl FnOnce(&ProfilerContext) -> T) -> Option<T> {
        match &*self.0.read().unwrap_or_else(PoisonError::into_inner) {
            SlotState::Active(context) => Some(body(context)),
            SlotState::BeforeInit | SlotState::Inactive => None,
        }
    }
}

/// The log function of plug-ins. It counts messages, and with the setting `nccl_print_logs` prints their formats. It does not
/// read the arguments behind the format.
unsafe extern "C" fn log(
    level: c_int,
    _subsystems: c_ulong,
    file: *const c_char,
    line: c_int,
    format: *const c_char,
) {
    Counter::NcclPluginLogs.add(1);
    if Setting::NcclPrintLogs.is_on() {
        let text = |text: *const c_char| {
            if text.is_null() {
                return "".into();
            }
            // SAFETY: the plug-in passes C strings.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        eprintln!("NCCL plug-in, level {level}, {}:{line}: {}", text(file), text(format));
    }
}
