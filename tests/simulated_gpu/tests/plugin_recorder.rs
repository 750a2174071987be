//! A profiler plug-in that records its calls. Its tables are symbols of this program, for `STATIC_PLUGIN`.
//!
//! It reads descriptors at the offsets of the C headers, so that it checks the layouts of the simulation.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};
use std::thread::ThreadId;

/// The bits of events.
pub const GROUP: i32 = 1;
pub const COLL: i32 = 1 << 1;
pub const P2P: i32 = 1 << 2;
pub const KERNEL_CHANNEL: i32 = 1 << 6;
pub const GROUP_API: i32 = 1 << 8;
pub const COLL_API: i32 = 1 << 9;
pub const P2P_API: i32 = 1 << 10;
pub const KERNEL_LAUNCH: i32 = 1 << 11;
/// All of them.
pub const ALL: i32 = 0xffff;

/// The word behind the descriptor of a plug-in's version.
pub const FILL: u64 = 0xa5a5_a5a5_a5a5_a5a5;

/// The arguments of `init`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Init {
    pub version: u32,
    pub hash: u64,
    pub has_name: bool,
    pub nodes: i32,
    pub ranks: i32,
    pub rank: i32,
}

/// An event, as `startEvent` has told it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Event {
    pub kind: i32,
    pub context: usize,
    pub handle: usize,
    pub parent: usize,
    pub rank: i32,
    pub function: String,
    pub datatype: String,
    pub algorithm: String,
    pub protocol: String,
    pub number: u64,
    pub buffers: [u64; 2],
    pub count: u64,
    /// The root or the peer.
    pub root: i32,
    pub channels: u8,
    pub channel: u8,
    pub gpu_time: u64,
    pub group_depth: i32,
    pub stream: u64,
    pub parent_group: u64,
    /// The words at 104, 112 and 128.
    pub ends: [u64; 3],
}

/// A call of the plug-in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    Init(Init),
    Start(Event),
    State { handle: usize, state: i32, time: Option<u64> },
    Stop { handle: usize },
    Finalize { context: usize },
}

static CALLS: Mutex<Vec<(ThreadId, Call)>> = Mutex::new(Vec::new());
/// The mask that `init` writes.
pub static INITIAL_MASK: AtomicI32 = AtomicI32::new(ALL);
/// The status of `init`.
pub static INIT_STATUS: AtomicI32 = AtomicI32::new(0);
/// The events that get the handle null, and those whose handle is not written.
pub static NULL_HANDLES: AtomicI32 = AtomicI32::new(0);
pub static UNWRITTEN_HANDLES: AtomicI32 = AtomicI32::new(0);
/// The mask of the process, at the address that the last `init` got.
static MASK: AtomicPtr<c_int> = AtomicPtr::new(std::ptr::null_mut());
static NEXT: AtomicU64 = AtomicU64::new(0x1000);

/// Changes the mask as a plug-in does.
pub fn set_mask(mask: i32) {
    let place = MASK.load(SeqCst);
    assert!(!place.is_null(), "a communicator has started");
    // SAFETY: the address is that of a number, valid for the rest of the process, which NCCL reads atomically.
    unsafe { AtomicI32::from_ptr(place) }.store(mask, SeqCst);
}

/// Returns all calls, and forgets them.
pub fn take_calls() -> Vec<(ThreadId, Call)> {
    std::mem::take(&mut *CALLS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Returns all calls.
pub fn calls() -> Vec<Call> {
    let calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    calls.iter().map(|(_, call)| call.clone()).collect()
}

/// Returns the started events of a kind.
pub fn started(kind: i32) -> Vec<Event> {
    let event = |call| match call {
        Call::Start(event) if event.kind == kind => Some(event),
        _ => None,
    };
    calls().into_iter().filter_map(event).collect()
}

/// Returns how many events of a kind have stopped.
pub fn stopped(kind: i32) -> usize {
    let handles: Vec<_> = started(kind).into_iter().map(|event| event.handle).collect();
    calls().iter().filter(|call| matches!(call, Call::Stop { handle } if handles.contains(handle))).count()
}

/// Returns the calls of one context as texts, in their order, without those of KernelCh.
pub fn transcript(calls: &[(ThreadId, Call)], context: usize) -> Vec<String> {
    let mut names = BTreeMap::new();
    let mut lines = Vec::new();
    for (_, call) in calls {
        match call {
            Call::Start(event) if event.context == context && event.kind != KERNEL_CHANNEL => {
                let name = match event.kind {
                    GROUP => "Group".to_owned(),
                    COLL => format!("{} {}", event.function, event.number),
                    P2P => format!("{} {}", event.function, event.root),
                    GROUP_API => "GroupApi".to_owned(),
                    COLL_API | P2P_API => format!("{} API", event.function),
                    KERNEL_LAUNCH => "KernelLaunch".to_owned(),
                    kind => panic!("there is no event {kind}"),
                };
                lines.push(format!("start {name}"));
                names.insert(event.handle, name);
            }
            Call::State { handle, state, .. } => {
                lines.extend(names.get(handle).map(|name| format!("state {state} of {name}")));
            }
            Call::Stop { handle } => {
                lines.extend(names.get(handle).map(|name| format!("stop {name}")));
            }
            _ => {}
        }
    }
    lines
}

fn record(call: Call) {
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    calls.push((std::thread::current().id(), call));
}

/// The type of a table; the versions differ in `init`.
#[repr(C)]
pub struct Table {
    name: *const c_char,
    init: *const c_void,
    start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const u8) -> c_int,
    stop: unsafe extern "C" fn(*mut c_void) -> c_int,
    state: unsafe extern "C" fn(*mut c_void, c_int, *const u64) -> c_int,
    finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
}

// SAFETY: a table is constant.
unsafe impl Sync for Table {}

const fn table(init: *const c_void) -> Table {
    Table { name: c"recorder".as_ptr(), init, start, stop, state, finalize }
}

/// Defines the tables, which NCCL finds by these names.
macro_rules! tables {
    ($($name:ident = $init:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            #[used]
            #[allow(non_upper_case_globals, reason = "NCCL defines the name")]
            static $name: Table = table($init as *const c_void);
        )*
    };
}

tables! {
    ncclProfiler_v4 = init_v4;
    ncclProfiler_v5 = init_of::<5>;
    ncclProfiler_v6 = init_of::<6>;
    ncclProfiler_v7 = init_of::<7>;
}

type Log = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

unsafe extern "C" fn init_v4(
    context: *mut usize,
    mask: *mut c_int,
    name: *const c_char,
    hash: u64,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    log: Log,
) -> c_int {
    let arguments = Init { version: 4, hash, has_name: !name.is_null(), nodes, ranks, rank };
    // SAFETY: as NCCL promises.
    unsafe { init(context, mask, arguments, log) }
}

unsafe extern "C" fn init_of<const VERSION: u32>(
    context: *mut usize,
    hash: u64,
    mask: *mut c_int,
    name: *const c_char,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    log: Log,
) -> c_int {
    let arguments = Init { version: VERSION, hash, has_name: !name.is_null(), nodes, ranks, rank };
    // SAFETY: as NCCL promises.
    unsafe { init(context, mask, arguments, log) }
}

unsafe fn init(context: *mut usize, mask: *mut c_int, arguments: Init, log: Log) -> c_int {
    // SAFETY: NCCL passes two places and a function. It is declared as C declares it, with a number of arguments that varies.
    unsafe {
        *context = context_of(arguments.rank);
        MASK.store(mask, SeqCst);
        set_mask(INITIAL_MASK.load(SeqCst));
        log(3, 1, c"recorder.c".as_ptr(), 7, c"rank %d of %d".as_ptr(), arguments.rank, arguments.ranks);
    }
    record(Call::Init(arguments));
    INIT_STATUS.load(SeqCst)
}

/// Returns the context of a rank.
pub fn context_of(rank: i32) -> usize {
    0x100 + rank as usize
}

/// The bytes of a descriptor.
struct Descriptor(*const u8);

impl Descriptor {
    fn read<T: Copy>(&self, offset: usize) -> T {
        // SAFETY: the simulation passes a descriptor of 136 bytes to every version, and numbers may have any value.
        unsafe { self.0.add(offset).cast::<T>().read_unaligned() }
    }

    fn text(&self, offset: usize) -> String {
        // SAFETY: the field is a C string.
        unsafe { CStr::from_ptr(self.read(offset)) }.to_str().expect("names are ASCII").to_owned()
    }
}

unsafe extern "C" fn start(context: *mut c_void, place: *mut *mut c_void, descriptor: *const u8) -> c_int {
    let from = Descriptor(descriptor);
    let kind = from.read::<u64>(0) as i32;
    let mut event = Event { kind, context: context as usize, ..Event::default() };
    (event.parent, event.rank) = (from.read(8), from.read(16));
    event.ends = [from.read(104), from.read(112), from.read(128)];
    match kind {
        COLL => {
            (event.number, event.function) = (from.read(24), from.text(32));
            event.buffers = [from.read(40), from.read(48)];
            (event.count, event.root, event.datatype) = (from.read(56), from.read(64), from.text(72));
            (event.channels, event.algorithm, event.protocol) = (from.read(80), from.text(88), from.text(96));
            event.parent_group = from.read(104);
        }
        P2P => {
            (event.function, event.buffers[0], event.datatype) =
                (from.text(24), from.read(32), from.text(40));
            (event.count, event.root, event.channels) = (from.read(48), from.read(56), from.read(60));
            event.parent_group = from.read(64);
        }
        KERNEL_CHANNEL => (event.channel, event.gpu_time) = (from.read(24), from.read(32)),
        GROUP_API => event.group_depth = from.read(28),
        COLL_API => {
            (event.function, event.count, event.datatype) = (from.text(24), from.read(32), from.text(40));
            (event.root, event.stream) = (from.read(48), from.read(56));
        }
        P2P_API => {
            (event.function, event.count, event.datatype) = (from.text(24), from.read(32), from.text(40));
            event.stream = from.read(48);
        }
        KERNEL_LAUNCH => event.stream = from.read(24),
        _ => {}
    }
    if kind & NULL_HANDLES.load(SeqCst) == 0 {
        event.handle = NEXT.fetch_add(1, SeqCst) as usize;
    }
    if kind & UNWRITTEN_HANDLES.load(SeqCst) == 0 {
        // SAFETY: NCCL passes a place.
        unsafe { *place = event.handle as *mut c_void };
    }
    record(Call::Start(event));
    0
}

unsafe extern "C" fn stop(handle: *mut c_void) -> c_int {
    record(Call::Stop { handle: handle as usize });
    0
}

unsafe extern "C" fn state(handle: *mut c_void, state: c_int, argument: *const u64) -> c_int {
    // SAFETY: NCCL passes a number, or null.
    let time = unsafe { argument.as_ref() }.copied();
    record(Call::State { handle: handle as usize, state, time });
    0
}

unsafe extern "C" fn finalize(context: *mut c_void) -> c_int {
    record(Call::Finalize { context: context as usize });
    0
}
