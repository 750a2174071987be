//! Device memory.
//!
//! The bytes of an allocation are a file in memory (memfd), so that other processes can map them. Streams use a mapping
//! that the program does not know. The program's address is a reservation without access: a host access is SIGSEGV. A
//! reservation is never given back, so no address is used twice.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use crate::context::current_device;
use crate::counters::{Counter, CounterGuard};
use crate::device::{DEVICES_MAX, Device};
use crate::error::{Answer, INVALID_VALUE, OUT_OF_MEMORY, code_of, write_out};
use crate::settings::Setting;
use crate::wait::lock;

pub const PAGE: usize = 4096;
/// Allocations are charged in this unit.
const CHARGE_UNIT: usize = 512;
const MAGIC: u64 = 0x6d65_6d20_7369_6d67;

/// Pages of a file, which streams read and write.
#[derive(Debug)]
pub struct Mapping {
    address: u64,
    len: usize,
}

impl Mapping {
    /// Maps a part of a file.
    pub fn new(file: BorrowedFd, offset: usize, len: usize) -> Option<Self> {
        let (access, file) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at =
            unsafe { libc::mmap(null_mut(), len, access, libc::MAP_SHARED, file, offset as libc::off_t) };
        (at != libc::MAP_FAILED).then(|| Self { address: at as u64, len })
    }

    /// Returns where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new`, and each user of it holds it.
        unsafe { libc::munmap(self.address as *mut _, self.len) };
    }
}

/// Creates a file in memory.
pub fn create_file(len: usize) -> Answer<OwnedFd> {
    // SAFETY: plain system calls; the descriptor is new, so it has no other owner.
    unsafe {
        let file = libc::memfd_create(c"simulated-gpu".as_ptr(), libc::MFD_CLOEXEC);
        if file < 0 {
            return Err(OUT_OF_MEMORY);
        }
        let file = OwnedFd::from_raw_fd(file);
        let is_sized = libc::ftruncate(file.as_raw_fd(), len as libc::off_t) == 0;
        is_sized.then_some(file).ok_or(OUT_OF_MEMORY)
    }
}

/// Returns the inode and the length of a file.
pub fn file_status(file: BorrowedFd) -> Option<(u64, usize)> {
    // SAFETY: a plain system call that fills the struct.
    unsafe {
        let mut status: libc::stat = std::mem::zeroed();
        (libc::fstat(file.as_raw_fd(), &raw mut status) == 0)
            .then_some((status.st_ino, status.st_size as usize))
    }
}

/// The last page of an allocation's file. All processes that map the allocation share it.
#[repr(C)]
struct SharedState {
    magic: AtomicU64,
    len: AtomicU64,
    /// The number of the device on its host.
    device: AtomicU64,
    /// Whether the owner has freed the allocation while others may still map it.
    is_freed: AtomicU32,
}

/// The bytes of one allocation.
#[derive(Debug)]
pub struct Backing {
    file: OwnedFd,
    inode: u64,
    len: usize,
    state: Mapping,
    /// The share of the device's memory that the allocation takes, in the process that made it.
    _charge: Option<DeviceMemoryCharge>,
}

impl Backing {
    /// Allocates memory of a device.
    pub fn create(device: Device, len: usize) -> Answer<Arc<Self>> {
        let charge = DeviceMemoryCharge::new(device, len)?;
        let pages = len.next_multiple_of(PAGE);
        let file = create_file(pages + PAGE)?;
        let state = Mapping::new(file.as_fd(), pages, PAGE).ok_or(OUT_OF_MEMORY)?;
        let (inode, _) = file_status(file.as_fd()).ok_or(OUT_OF_MEMORY)?;
        let backing = Self { file, inode, len, state, _charge: Some(charge) };
        backing.shared().len.store(len as u64, SeqCst);
        backing.shared().device.store(device.host_number(), SeqCst);
        backing.shared().magic.store(MAGIC, SeqCst);
        Ok(Arc::new(backing))
    }

    /// Takes an allocation of any process by its file; `None` if the file is something else.
    pub fn open(file: OwnedFd) -> Option<Arc<Self>> {
        let (inode, size) = file_status(file.as_fd())?;
        let pages = size.checked_sub(PAGE).filter(|pages| *pages > 0 && pages % PAGE == 0)?;
        let state = Mapping::new(file.as_fd(), pages, PAGE)?;
        let mut backing = Self { file, inode, len: 0, state, _charge: None };
        let (magic, len) = (backing.shared().magic.load(SeqCst), backing.shared().len.load(SeqCst));
        backing.len = usize::try_from(len).ok()?;
        (magic == MAGIC && backing.len.next_multiple_of(PAGE) == pages).then(|| Arc::new(backing))
    }

    fn shared(&self) -> &SharedState {
        // SAFETY: the page is mapped as long as `self` lives; atomics may have any value.
        unsafe { &*(self.state.address as *const SharedState) }
    }

    /// Returns whether a device can access the memory: that of another device only as [`Setting::PeerAccess`] says.
    pub fn is_accessible_to(&self, device: Device) -> bool {
        Setting::PeerAccess.amount() != 0 || self.shared().device.load(SeqCst) == device.host_number()
    }

    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub fn inode(&self) -> u64 {
        self.inode
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Marks the memory as freed, for all processes that have it.
    pub fn mark_freed(&self) {
        self.shared().is_freed.store(1, SeqCst);
    }

    /// Returns whether the owner has freed the allocation.
    pub fn is_freed(&self) -> bool {
        self.shared().is_freed.load(SeqCst) != 0
    }
}

/// A part of a device's memory that is in use.
#[derive(Debug)]
struct DeviceMemoryCharge {
    device: Device,
    bytes: usize,
}

static CHARGED: Mutex<[usize; DEVICES_MAX]> = Mutex::new([0; DEVICES_MAX]);

impl DeviceMemoryCharge {
    fn new(device: Device, len: usize) -> Answer<Self> {
        let bytes = len.checked_next_multiple_of(CHARGE_UNIT).ok_or(OUT_OF_MEMORY)?;
        let mut charged = lock(&CHARGED);
        let used = charged[device.index()].checked_add(bytes).ok_or(OUT_OF_MEMORY)?;
        if used as u64 > Setting::Memory.amount() {
            return Err(OUT_OF_MEMORY);
        }
        charged[device.index()] = used;
        Counter::DeviceBytes.add(bytes as i64);
        Ok(Self { device, bytes })
    }
}

impl Drop for DeviceMemoryCharge {
    fn drop(&mut self) {
        lock(&CHARGED)[self.device.index()] -= self.bytes;
        Counter::DeviceBytes.add(-(self.bytes as i64));
    }
}

/// How a range of addresses came to have memory.
#[derive(Debug)]
pub enum SegmentKind {
    /// By `cuMemAlloc`.
    Allocated { _guard: CounterGuard },
    /// By an IPC handle, opened this often.
    Imported { opened: u32, _guard: CounterGuard },
    /// By `cuMemMap`; accessible after `cuMemSetAccess`.
    Mapped { is_accessible: bool, _guard: Arc<CounterGuard> },
}

/// A range of addresses with memory.
#[derive(Debug)]
pub struct MappedSegment {
    pub base: u64,
    pub len: usize,
    pub device: Device,
    pub kind: SegmentKind,
    pub backing: Arc<Backing>,
    mapping: Arc<Mapping>,
    /// Tells this segment from all others, also from one at the same address later.
    pub id: u64,
}

impl MappedSegment {
    fn end(&self) -> u64 {
        self.base + self.len as u64
    }

    fn is_usable(&self) -> bool {
        let is_accessible = !matches!(self.kind, SegmentKind::Mapped { is_accessible: false, .. });
        is_accessible && !self.backing.is_freed()
    }
}

/// The ranges with memory, by their first address.
static SEGMENTS: Mutex<BTreeMap<u64, MappedSegment>> = Mutex::new(BTreeMap::new());

/// Bytes that a stream may use. They stay mapped as long as this lives.
#[derive(Debug)]
pub struct UsablePiece {
    pub address: u64,
    pub len: usize,
    /// Keeps device memory mapped.
    pub _mapping: Option<Arc<Mapping>>,
}

/// The addresses of devices, for ever: first address and length.
static ADDRESSES: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

/// Returns whether an address is one of a device, with or without memory.
pub fn is_device_address(at: u64) -> bool {
    lock(&ADDRESSES).range(..=at).next_back().is_some_and(|(base, len)| at - base < *len as u64)
}

/// Reserves addresses of a device, for ever.
pub fn reserve(len: usize, alignment: usize) -> Answer<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let whole = len.checked_add(alignment).ok_or(OUT_OF_MEMORY)?;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(null_mut(), whole, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(OUT_OF_MEMORY);
    }
    let base = (at as u64).next_multiple_of(alignment as u64);
    lock(&ADDRESSES).insert(base, len);
    Ok(base)
}

/// Gives memory to the reserved range at `base`.
pub fn add_segment(
    base: u64,
    device: Device,
    backing: Arc<Backing>,
    len: usize,
    kind: SegmentKind,
) -> Answer {
    static LAST_ID: AtomicU64 = AtomicU64::new(0);
    let mapping = Mapping::new(backing.file(), 0, len.next_multiple_of(PAGE)).ok_or(OUT_OF_MEMORY)?;
    let (mapping, id) = (Arc::new(mapping), LAST_ID.fetch_add(1, SeqCst) + 1);
    let segment = MappedSegment { base, len, device, kind, backing, mapping, id };
    lock(&SEGMENTS).insert(base, segment);
    Ok(())
}

/// Runs a function on the segment that contains an address.
pub fn with_segment<T>(at: u64, body: impl FnOnce(&mut MappedSegment) -> T) -> Option<T> {
    let mut segments = lock(&SEGMENTS);
    let (_, segment) = segments.range_mut(..=at).next_back()?;
    (at < segment.end()).then(|| body(segment))
}

/// Runs a function on the first segment for which it returns something.
pub fn find_segment<T>(body: impl FnMut(&mut MappedSegment) -> Option<T>) -> Option<T> {
    lock(&SEGMENTS).values_mut().find_map(body)
}

/// Removes the segment at `base`, if a condition holds.
pub fn remove_segment(base: u64, condition: impl FnOnce(&MappedSegment) -> bool) -> Answer<MappedSegment> {
    let mut segments = lock(&SEGMENTS);
    let is_right = segments.get(&base).is_some_and(condition);
    is_right.then(|| segments.remove(&base)).flatten().ok_or(INVALID_VALUE)
}

/// Frees the allocations and imports of a device whose context ends.
pub fn free_all(device: Device) {
    lock(&SEGMENTS).retain(|_, segment| {
        let stays = segment.device != device || matches!(segment.kind, SegmentKind::Mapped { .. });
        if !stays && matches!(segment.kind, SegmentKind::Allocated { .. }) {
            segment.backing.mark_freed();
        }
        stays
    });
}

/// Returns the bytes of a range of device memory, which may span segments; `None` if a part of it is not usable.
pub fn find_usable_pieces(at: u64, len: usize) -> Option<Vec<UsablePiece>> {
    let segments = lock(&SEGMENTS);
    let (mut at, mut left) = (at, len);
    let mut pieces = Vec::new();
    while left > 0 || pieces.is_empty() {
        let (_, segment) = segments.range(..=at).next_back()?;
        if at >= segment.end() || !segment.is_usable() {
            return None;
        }
        let offset = at - segment.base;
        let len = left.min(segment.len - offset as usize);
        let mapping = segment.mapping.clone();
        pieces.push(UsablePiece { address: mapping.address() + offset, len, _mapping: Some(mapping) });
        at += len as u64;
        left -= len;
    }
    Some(pieces)
}

/// Returns the free and all bytes of memory of the current context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    code_of(current_device().and_then(|device| {
        let all = Setting::Memory.amount() as usize;
        let used = lock(&CHARGED)[device.index()];
        // SAFETY: the caller passes places for two numbers.
        unsafe { write_out(free, all.saturating_sub(used)).and(write_out(total, all)) }
    }))
}

/// Allocates device memory; length 0 gives error 1. Error 2 (out of memory) is not sticky. The manual promises no contents.
///
/// Stricter: the bytes behind the last one are not usable. A real driver takes its memory in blocks of 2 MiB.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(to: *mut u64, len: usize) -> c_int {
    code_of(current_device().and_then(|device| {
        if len == 0 || to.is_null() {
            return Err(INVALID_VALUE);
        }
        if Setting::AllocFails.count_use_and_strikes_now() {
            return Err(OUT_OF_MEMORY);
        }
        let backing = Backing::create(device, len)?;
        let base = reserve(len.next_multiple_of(PAGE), PAGE)?;
        add_segment(
            base,
            device,
            backing,
            len,
            SegmentKind::Allocated { _guard: Counter::Allocations.count_while_guard_lives() },
        )?;
        // SAFETY: the caller passes a place for an address.
        unsafe { write_out(to, base) }
    }))
}
