//! A domain of a fabric: the handles of the library that everything else of the fabric needs, and what wakes the thread that drives it.
//!
//! Begin at [`Domain::open`].
#![allow(unsafe_code, reason = "calls libfabric")]

use std::ffi::{CStr, CString, c_int};
use std::net::IpAddr;
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::error::{FabricError, FabricUnavailable};
use crate::layouts as fi;
use crate::library::Library;

/// `FI_SOURCE`: the node is one's own address.
const SOURCE: u64 = 1 << 57;

/// A provider that dereferences a null pointer when it flushes what a connection that ends has not sent (`rxm_handle_comp_error`), and
/// the first version without that: from then on the provider below it is another one.
const CRASHING_PROVIDER: &str = "tcp;ofi_rxm";
const CRASHES_BEFORE: (u32, u32) = (1, 18);

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

/// An open domain of an open fabric.
pub struct Domain {
    pub library: &'static Library,
    pub info: OwnedInfo,
    fabric: NonNull<fi::FabricFid>,
    pub handle: NonNull<fi::DomainFid>,
    pub provider: FabricProvider,
    /// The key of the next registration, for providers that do not choose it.
    next_key: AtomicU64,
    pub sleep: Sleep,
}

// SAFETY: the domain was opened for use by any thread.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl std::fmt::Debug for Domain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Fabric").field(&self.provider).finish()
    }
}

/// The sleep of the thread that drives a fabric.
#[derive(Default)]
pub struct Sleep {
    is_asleep: Mutex<bool>,
    wanted: Condvar,
}

impl Sleep {
    /// Sleeps for a time, or until it is woken.
    pub fn sleep(&self, pause: Duration) {
        let mut is_asleep = self.is_asleep.lock().unwrap_or_else(PoisonError::into_inner);
        *is_asleep = true;
        let (mut is_asleep, _) =
            self.wanted.wait_timeout(is_asleep, pause).unwrap_or_else(PoisonError::into_inner);
        *is_asleep = false;
    }

    /// Wakes the thread, if it sleeps.
    pub fn wake(&self) {
        let is_asleep = std::mem::take(&mut *self.is_asleep.lock().unwrap_or_else(PoisonError::into_inner));
        if is_asleep {
            self.wanted.notify_one();
        }
    }
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

    pub const fn get(&self) -> &fi::Info {
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

impl Domain {
    /// Opens the fabric of a provider, as [`Fabric::open`](crate::Fabric::open) does.
    pub fn open(provider: &str, address: Option<IpAddr>) -> Result<Self, FabricUnavailable> {
        let library = Library::get()?;
        let info = describe(library, provider, address)?;
        let found = provider_of(info.get());
        if found.provider == CRASHING_PROVIDER && library.version_pair() < CRASHES_BEFORE {
            let why = "before libfabric 1.18 it crashes when a connection with traffic in both directions ends; use the provider sockets";
            return Err(FabricUnavailable::Provider { provider: found.provider, why: why.to_owned() });
        }
        let calls = library.lock_calls();
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
        drop(calls);
        let (Some(fabric), Some(handle)) = (NonNull::new(fabric), NonNull::new(domain)) else {
            return Err(library.error("fi_domain", libc::EINVAL).into());
        };
        let mut first = [0; 8];
        getrandom::fill(&mut first).map_err(|_| library.error("getrandom", libc::EIO))?;
        Ok(Self {
            library,
            provider: found,
            info,
            fabric,
            handle,
            next_key: AtomicU64::new(u64::from_le_bytes(first)),
            sleep: Sleep::default(),
        })
    }

    /// Returns what registrations of memory need, as `FI_MR_…`.
    pub const fn memory_mode(&self) -> c_int {
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
    pub fn new_key(&self) -> u64 {
        // SAFETY: as above.
        let bytes = unsafe { (*self.info.get().domain_attr).mr_key_size };
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        if bytes >= 8 { key } else { key & ((1 << (8 * bytes)) - 1) }
    }

    /// Closes a handle of the library. The caller has [locked the calls](Library::lock_calls).
    ///
    /// # Safety
    /// It is open, and is used no more.
    pub unsafe fn close_fid(&self, call: &'static str, fid: *mut fi::Fid) -> bool {
        // SAFETY: the caller guarantees it.
        unsafe { close_fid(self.library, call, fid) }
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        let _calls = self.library.lock_calls();
        // SAFETY: endpoints and memory keep the domain, so nothing of it is open any more.
        unsafe {
            self.close_fid("fi_close of a domain", self.handle.as_ptr().cast());
            self.close_fid("fi_close of a fabric", self.fabric.as_ptr().cast());
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
pub fn describe(
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
    let _calls = library.lock_calls();
    // SAFETY: the names are C strings, and the call writes a list.
    let result =
        unsafe { (library.get_info)(fi::API_VERSION, node, null(), flags, hints.as_ptr(), &raw mut found) };
    library.check("fi_getinfo", result as isize).map_err(|error| no_such(error.to_string()))?;
    NonNull::new(found)
        .map(|found| OwnedInfo(library, found))
        .ok_or_else(|| no_such("none was found".to_owned()))
}

pub fn provider_of(info: &fi::Info) -> FabricProvider {
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
