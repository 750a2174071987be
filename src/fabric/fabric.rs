//! An open fabric, the thread that drives it, and the fabrics that a host has.
//!
//! Begin at [`Fabric::open`].
#![allow(
    unsafe_code,
    reason = "follows a list of libfabric, and passes on what its callers promise of memory"
)]

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::domain::{Domain, FabricProvider, describe, provider_of};
use crate::endpoint::{EndpointInner, FabricEndpoint};
use crate::error::{FabricError, FabricUnavailable};
use crate::layouts as fi;
use crate::library::Library;
use crate::registered_memory::RegisteredMemory;

/// The rounds in which the thread looks again at once: a program that reads again and again finds it awake.
const ROUNDS_AWAKE: u32 = 256;
/// The shortest and the longest pause between two looks after that.
const PAUSE_MIN: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(1);

/// An open fabric. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Fabric(Arc<FabricShared>);

impl PartialEq for Fabric {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Fabric {}

#[derive(Debug)]
struct FabricShared {
    domain: Arc<Domain>,
    progress: Mutex<Progress>,
}

/// The state of the thread that drives the fabric.
#[derive(Debug, Default)]
struct Progress {
    endpoints: Vec<Weak<EndpointInner>>,
    has_thread: bool,
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
    let mut next = NonNull::new(found.as_ptr());
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
        let domain = Arc::new(Domain::open(provider, address)?);
        Ok(Self(Arc::new(FabricShared { domain, progress: Mutex::default() })))
    }

    /// Returns the provider and the name of the fabric.
    #[must_use]
    pub fn provider(&self) -> &FabricProvider {
        &self.0.domain.provider
    }

    /// Returns whether memory must be registered before reads go into it.
    #[must_use]
    pub fn needs_local_registration(&self) -> bool {
        self.0.domain.memory_mode() & fi::MR_LOCAL != 0
    }

    /// Registers memory, for reads by peers and for reads into it.
    ///
    /// # Errors
    /// Returns the error of the library: often that the limit of locked memory (`ulimit -l`) is too low.
    ///
    /// # Safety
    /// The memory stays mapped until what is returned was dropped. Peers may read it until then.
    pub unsafe fn register(&self, memory: NonNull<u8>, len: usize) -> Result<RegisteredMemory, FabricError> {
        // SAFETY: the caller guarantees the memory.
        unsafe { RegisteredMemory::register(&self.0.domain, memory, len) }
    }

    /// Opens an endpoint for the reads between this process and one life of one peer.
    ///
    /// # Errors
    /// Returns the error of the library.
    pub fn open_endpoint(&self) -> Result<FabricEndpoint, FabricError> {
        let endpoint = FabricEndpoint::open(&self.0.domain, self.0.clone())?;
        self.0.drive(endpoint.inner())?;
        Ok(endpoint)
    }
}

impl FabricShared {
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
        drop(progress);
        self.domain.sleep.wake();
        Ok(())
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
}

fn poll_while_it_lives(fabric: &Weak<FabricShared>) {
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
            Some(asleep) => {
                // The longer the more rounds were idle.
                fabric.domain.sleep.sleep(PAUSE_MAX.min(PAUSE_MIN * (1 + asleep / 64)));
            }
        }
    }
}
