//! An open fabric, the thread that drives it, and the fabrics that a host has.
//!
//! Begin at [`Fabric::open`].
#![allow(unsafe_code, reason = "calls libfabric")]

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_int, c_void};
use std::net::IpAddr;
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::endpoint::{EndpointInner, FabricEndpoint};
use crate::error::{FabricError, FabricUnavailable};
use crate::layouts as fi;
use crate::library::Library;
use crate::registered_memory::RegisteredMemory;

/// `FI_SOURCE`: the node is one's own address.
const SOURCE: u64 = 1 << 57;
/// The rounds in which the thread looks again at once: a program that reads again and again finds it awake.
const ROUNDS_AWAKE: u32 = 256;
/// The shortest and the longest pause between two looks after that.
const PAUSE_MIN: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(1);

/// A provider of the library, with the fabric that it reaches from this host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FabricProvider {
    /// The name of the provider, such as `verbs;ofi_rxm` or `efa`.
    pub provider: String,
    /// The provider's name of the fabric. Two hosts that have the same name are in one fabric.
    pub fabric: String,
    /// The provider's name of the device or interface.
    pub domain: String,
}

/// An open fabric. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Fabric(Arc<FabricInner>);

pub struct FabricInner {
    pub library: &'static Library,
    pub info: OwnedInfo,
    fabric: NonNull<fi::FabricFid>,
    pub domain: NonNull<fi::DomainFid>,
    provider: FabricProvider,
    /// The key of the next registration, for providers that do not choose it.
    next_key: AtomicU64,
    progress: Mutex<Progress>,
    wanted: Condvar,
}

// SAFETY: the domain was opened for use by any thread.
unsafe impl Send for FabricInner {}
// SAFETY: as above.
unsafe impl Sync for FabricInner {}

impl std::fmt::Debug for FabricInner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Fabric").field(&self.provider).finish()
    }
}

/// What the thread that drives the fabric does.
#[derive(Default)]
struct Progress {
    endpoints: Vec<Weak<EndpointInner>>,
    has_thread: bool,
    is_asleep: bool,
}

/// A description of the library, which this frees.
pub struct OwnedInfo(&'static Library, NonNull<fi::Info>);

impl OwnedInfo {
    fn empty(library: &'static Library) -> Result<Self, FabricError> {
        // SAFETY: the library makes an empty description.
        let info = NonNull::new(unsafe { (library.duplicate_info)(null()) });
        info.map(|info| Self(library, info)).ok_or_else(|| library.error("fi_dupinfo", libc::ENOMEM))
    }

    pub const fn as_ptr(&self) -> *mut fi::Info {
        self.1.as_ptr()
    }

    const fn get(&self) -> &fi::Info {
        // SAFETY: the description lives as long as this.
        unsafe { self.1.as_ref() }
    }
}

impl Drop for OwnedInfo {
    fn drop(&mut self) {
        // SAFETY: the description is the library's, and is used no more.
        unsafe { (self.0.free_info)(self.1.as_ptr()) };
    }
}

/// Returns the version of libfabric.
///
/// # Errors
/// Returns why it cannot be used.
pub fn library_version() -> Result<(u32, u32), FabricUnavailable> {
    Library::get().map(Library::version_pair)
}

/// Returns the providers with which this host can read a peer's memory, the library's first choice first.
///
/// # Errors
/// Returns why there is none.
pub fn providers() -> Result<Vec<FabricProvider>, FabricUnavailable> {
    let library = Library::get()?;
    let found = describe(library, "", None)?;
    let (mut seen, mut all) = (BTreeSet::new(), Vec::new());
    let mut next = Some(found.1);
    while let Some(info) = next {
        // SAFETY: the list lives as long as `found`.
        let info = unsafe { info.as_ref() };
        let provider = provider_of(info);
        if seen.insert(provider.clone()) {
            all.push(provider);
        }
        next = NonNull::new(info.next);
    }
    Ok(all)
}

impl Fabric {
    /// Opens the fabric of a provider, such as `tcp;ofi_rxm` or `verbs;ofi_rxm`; of the library's first choice if the name is empty.
    /// `address` is the one of this host at which peers reach it, for providers that have IP addresses.
    ///
    /// # Errors
    /// Returns why the process has no such fabric.
    pub fn open(provider: &str, address: Option<IpAddr>) -> Result<Self, FabricUnavailable> {
        let library = Library::get()?;
        let info = describe(library, provider, address)?;
        let (mut fabric, mut domain) = (null_mut(), null_mut());
        // SAFETY: the description is the library's, and the calls write handles.
        unsafe {
            let attributes = info.get().fabric_attr;
            library.check(
                "fi_fabric",
                (library.open_fabric)(attributes, &raw mut fabric, null_mut()) as isize,
            )?;
            let open = (*(*fabric).ops).domain;
            let opened = open(fabric, info.as_ptr(), &raw mut domain, null_mut());
            if let Err(error) = library.check("fi_domain", opened as isize) {
                close_fid(library, "fi_close of a fabric", fabric.cast());
                return Err(error.into());
            }
        }
        let (Some(fabric), Some(domain)) = (NonNull::new(fabric), NonNull::new(domain)) else {
            return Err(library.error("fi_domain", libc::EINVAL).into());
        };
        let mut first = [0; 8];
        getrandom::fill(&mut first).map_err(|_| library.error("getrandom", libc::EIO))?;
        Ok(Self(Arc::new(FabricInner {
            library,
            provider: provider_of(info.get()),
            info,
            fabric,
            domain,
            next_key: AtomicU64::new(u64::from_le_bytes(first)),
            progress: Mutex::default(),
            wanted: Condvar::new(),
        })))
    }

    /// Returns the provider and the name of the fabric.
    #[must_use]
    pub fn provider(&self) -> &FabricProvider {
        &self.0.provider
    }

    /// Returns whether memory must be registered before reads go into it.
    #[must_use]
    pub fn needs_local_registration(&self) -> bool {
        self.0.memory_mode() & fi::MR_LOCAL != 0
    }

    /// Registers memory, for reads by peers and for reads into it.
    ///
    /// # Errors
    /// Returns the error of the library: often that the limit of locked memory (`ulimit -l`) is too low.
    ///
    /// # Safety
    /// The memory stays mapped until what is returned was dropped. Peers may read it until then.
    pub unsafe fn register(&self, memory: NonNull<u8>, len: usize) -> Result<RegisteredMemory, FabricError> {
        let inner = &self.0;
        let (mut registered, access) = (null_mut(), fi::CAP_READ | fi::CAP_REMOTE_READ);
        // SAFETY: the caller guarantees the memory, and the domain is open.
        let result = unsafe {
            let domain = inner.domain.as_ptr();
            let register = (*(*domain).mr).reg;
            let address = memory.as_ptr().cast::<c_void>();
            register(
                domain.cast(),
                address,
                len,
                access,
                0,
                inner.new_key(),
                0,
                &raw mut registered,
                null_mut(),
            )
        };
        inner.library.check("fi_mr_reg", result as isize)?;
        let registered =
            NonNull::new(registered).ok_or_else(|| inner.library.error("fi_mr_reg", libc::EINVAL))?;
        let base = if inner.memory_mode() & fi::MR_VIRT_ADDR == 0 { 0 } else { memory.addr().get() as u64 };
        Ok(RegisteredMemory::new(Arc::clone(inner), registered, base, len))
    }

    /// Opens an endpoint for the reads between this process and one life of one peer.
    ///
    /// # Errors
    /// Returns the error of the library.
    pub fn open_endpoint(&self) -> Result<FabricEndpoint, FabricError> {
        let endpoint = FabricEndpoint::open(&self.0)?;
        self.0.drive(endpoint.inner())?;
        Ok(endpoint)
    }
}

impl FabricInner {
    const fn memory_mode(&self) -> c_int {
        // SAFETY: the library has filled the description in, and it lives as long as this.
        unsafe { (*self.info.get().domain_attr).mr_mode }
    }

    /// Returns whether bytes of a peer have the form of an address of the provider, so that the library reads no further.
    pub fn is_address(&self, bytes: &[u8]) -> bool {
        let info = self.info.get();
        if info.addr_format == fi::ADDRESS_TEXT {
            bytes.last() == Some(&0)
        } else {
            bytes.len() == info.src_addrlen
        }
    }

    /// Returns a key for a registration. Peers cannot guess it from that of another process.
    fn new_key(&self) -> u64 {
        // SAFETY: as above.
        let bytes = unsafe { (*self.info.get().domain_attr).mr_key_size };
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        if bytes >= 8 { key } else { key & ((1 << (8 * bytes)) - 1) }
    }

    /// Closes a handle of the library.
    ///
    /// # Safety
    /// It is open, and is used no more.
    pub unsafe fn close_fid(&self, call: &'static str, fid: *mut fi::Fid) -> bool {
        // SAFETY: the caller guarantees it.
        unsafe { close_fid(self.library, call, fid) }
    }

    /// Has the thread poll an endpoint from now on.
    fn drive(self: &Arc<Self>, endpoint: &Arc<EndpointInner>) -> Result<(), FabricError> {
        let mut progress = self.lock_progress();
        if !progress.has_thread {
            // The thread ends when the fabric does, so it does not keep it.
            let fabric = Arc::downgrade(self);
            let started = std::thread::Builder::new()
                .name("muster-fabric".to_owned())
                .spawn(move || poll_while_it_lives(&fabric));
            let failed = |error: std::io::Error| FabricError {
                call: "pthread_create",
                code: error.raw_os_error().unwrap_or(libc::EAGAIN),
                name: error.to_string(),
            };
            started.map_err(failed)?;
            progress.has_thread = true;
        }
        progress.endpoints.push(Arc::downgrade(endpoint));
        self.wake(progress);
        Ok(())
    }

    /// Wakes the thread, if it sleeps.
    pub fn wake_progress(&self) {
        self.wake(self.lock_progress());
    }

    fn wake(&self, mut progress: MutexGuard<'_, Progress>) {
        if std::mem::take(&mut progress.is_asleep) {
            drop(progress);
            self.wanted.notify_one();
        }
    }

    fn lock_progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls all endpoints once. Returns whether something moved, or none if there is no endpoint any more: then the thread ends.
    fn poll_endpoints(&self) -> Option<bool> {
        let mut progress = self.lock_progress();
        progress.endpoints.retain(|endpoint| endpoint.strong_count() > 0);
        if progress.endpoints.is_empty() {
            progress.has_thread = false;
            return None;
        }
        let endpoints: Vec<_> = progress.endpoints.iter().filter_map(Weak::upgrade).collect();
        drop(progress);
        // Not `any`: each one is polled.
        Some(endpoints.iter().fold(false, |moved, endpoint| endpoint.poll() | moved))
    }

    /// Sleeps a moment, the longer the more rounds were idle, or until there is a new read.
    fn wait_for_next_round(&self, idle_rounds: u32) {
        let pause = PAUSE_MAX.min(PAUSE_MIN * (1 + idle_rounds / 64));
        let mut progress = self.lock_progress();
        progress.is_asleep = true;
        let (mut progress, _) =
            self.wanted.wait_timeout(progress, pause).unwrap_or_else(PoisonError::into_inner);
        progress.is_asleep = false;
    }
}

impl Drop for FabricInner {
    fn drop(&mut self) {
        // SAFETY: endpoints and memory keep the fabric, so nothing of it is open any more.
        unsafe {
            self.close_fid("fi_close of a domain", self.domain.as_ptr().cast());
            self.close_fid("fi_close of a fabric", self.fabric.as_ptr().cast());
        }
    }
}

fn poll_while_it_lives(fabric: &Weak<FabricInner>) {
    let mut idle_rounds = 0_u32;
    while let Some(fabric) = fabric.upgrade() {
        match fabric.poll_endpoints() {
            None => return,
            Some(true) => idle_rounds = 0,
            Some(false) => idle_rounds = idle_rounds.saturating_add(1),
        }
        match idle_rounds.checked_sub(ROUNDS_AWAKE) {
            None if idle_rounds > 0 => std::thread::yield_now(),
            None => {}
            Some(asleep) => fabric.wait_for_next_round(asleep),
        }
    }
}

/// Closes a handle of the library. Returns whether the library did.
///
/// # Safety
/// It is open, and is used no more.
unsafe fn close_fid(library: &Library, call: &'static str, fid: *mut fi::Fid) -> bool {
    // SAFETY: the caller guarantees the handle; its table is the library's.
    let result = unsafe { ((*(*fid).ops).close)(fid) };
    let closed = library.check(call, result as isize);
    if let Err(error) = &closed {
        tracing::warn!(%error, "libfabric keeps what was closed");
    }
    closed.is_ok()
}

/// Asks for the providers that can read a peer's memory, in the library's order.
fn describe(
    library: &'static Library,
    provider: &str,
    address: Option<IpAddr>,
) -> Result<OwnedInfo, FabricUnavailable> {
    let hints = OwnedInfo::empty(library)?;
    let no_such = |why: String| FabricUnavailable::Provider { provider: provider.to_owned(), why };
    let wanted = CString::new(provider).map_err(|_| no_such("the name has a zero byte".to_owned()))?;
    let node = address.map(|address| CString::new(address.to_string()).unwrap_or_default());
    // SAFETY: the library has made the description and its parts, and frees the name, which its allocator has made.
    unsafe {
        let hints = &mut *hints.as_ptr();
        hints.caps = fi::CAP_RMA | fi::CAP_READ | fi::CAP_REMOTE_READ;
        hints.mode = fi::MODE_CONTEXT | fi::MODE_CONTEXT2;
        (*hints.ep_attr).kind = fi::ENDPOINT_RDM;
        (*hints.domain_attr).threading = fi::THREAD_SAFE;
        (*hints.domain_attr).mr_mode = fi::MR_LOCAL | fi::MR_VIRT_ADDR | fi::MR_ALLOCATED | fi::MR_PROV_KEY;
        if !provider.is_empty() {
            (*hints.fabric_attr).prov_name = libc::strdup(wanted.as_ptr());
        }
    }
    let (node, flags) = node.as_ref().map_or((null(), 0), |node| (node.as_ptr(), SOURCE));
    let mut found = null_mut();
    // SAFETY: the names are C strings, and the call writes a list.
    let result =
        unsafe { (library.get_info)(fi::API_VERSION, node, null(), flags, hints.as_ptr(), &raw mut found) };
    library.check("fi_getinfo", result as isize).map_err(|error| no_such(error.to_string()))?;
    NonNull::new(found)
        .map(|found| OwnedInfo(library, found))
        .ok_or_else(|| no_such("none was found".to_owned()))
}

fn provider_of(info: &fi::Info) -> FabricProvider {
    let text = |name: *const std::ffi::c_char| {
        if name.is_null() {
            return String::new();
        }
        // SAFETY: names of the library are C strings, which live as long as the description.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    };
    // SAFETY: the library fills these in.
    unsafe {
        let (fabric, domain) = (&*info.fabric_attr, &*info.domain_attr);
        FabricProvider {
            provider: text(fabric.prov_name),
            fabric: text(fabric.name),
            domain: text(domain.name),
        }
    }
}
