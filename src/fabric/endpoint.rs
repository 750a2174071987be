//! The end of the reads between this process and one peer.
//!
//! All calls of the library for an endpoint are made under its lock and that of all calls; listeners are called without them. Begin at
//! [`FabricEndpoint::read`].
#![allow(unsafe_code, reason = "calls libfabric")]

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::ptr::{NonNull, null, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::domain::Domain;
use crate::error::FabricError;
use crate::layouts as fi;
use crate::registered_memory::{RegisteredMemory, RemoteBytes};

/// The most ends of reads that one look takes.
const ENTRIES: usize = 32;
/// The most bytes of an endpoint's address.
const ADDRESS_MAX: usize = 256;

type EndListener = Box<dyn FnOnce(Result<(), FabricError>) + Send>;

/// A read. The library keeps the address of the first field while the read is under way.
#[repr(C)]
struct Read {
    /// Memory of the provider (`struct fi_context2`).
    context: [u64; 8],
    into: *mut c_void,
    len: usize,
    descriptor: *mut c_void,
    from: RemoteBytes,
    then: EndListener,
}

struct EndpointState {
    /// None once it was closed.
    open: Option<OpenEndpoint>,
    /// Whether the library has refused to close it.
    is_close_refused: bool,
    /// The address by which the library knows the peer.
    peer: u64,
    /// Reads that the library has not taken.
    waiting: VecDeque<Box<Read>>,
    /// Reads that the library has taken, by the context that it has of them: their address. Each stays where it is.
    under_way: HashMap<*mut c_void, Box<Read>>,
}

/// The handles of the library.
struct OpenEndpoint {
    endpoint: NonNull<fi::EndpointFid>,
    queue: NonNull<fi::QueueFid>,
    addresses: NonNull<fi::AddressFid>,
}

// SAFETY: the pointers are used under the lock of the endpoint only, and the domain was opened for use by any thread. The memory of
// reads is that of their callers, who promise it until the end.
unsafe impl Send for EndpointState {}

pub struct EndpointInner {
    domain: Arc<Domain>,
    state: Mutex<EndpointState>,
}

/// An endpoint for the reads between this process and one life of one peer. It is closed when it is dropped.
pub struct FabricEndpoint {
    inner: Arc<EndpointInner>,
    /// Keeps the thread that polls the endpoint.
    _driver: Arc<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for FabricEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FabricEndpoint").field(&self.inner.domain).finish()
    }
}

/// The reads that ended under the lock.
type Ended = Vec<(EndListener, Result<(), FabricError>)>;

impl FabricEndpoint {
    /// Opens one. `driver` keeps the thread that is to poll it.
    pub(crate) fn open(
        domain: &Arc<Domain>,
        driver: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, FabricError> {
        let calls = domain.library.lock_calls();
        let open = OpenEndpoint::open(domain)?;
        drop(calls);
        let state = EndpointState {
            open: Some(open),
            is_close_refused: false,
            peer: fi::ADDRESS_UNSPECIFIED,
            waiting: VecDeque::new(),
            under_way: HashMap::new(),
        };
        let inner = EndpointInner { domain: Arc::clone(domain), state: Mutex::new(state) };
        Ok(Self { inner: Arc::new(inner), _driver: driver })
    }

    pub(crate) const fn inner(&self) -> &Arc<EndpointInner> {
        &self.inner
    }

    /// Returns the address that the peer passes to [`connect`](Self::connect).
    ///
    /// # Errors
    /// Returns the error of the library, or that the endpoint was closed.
    pub fn address(&self) -> Result<Vec<u8>, FabricError> {
        let _calls = self.inner.domain.library.lock_calls();
        let state = self.inner.lock();
        let open = state.open.as_ref().ok_or_else(FabricError::closed)?;
        let (mut address, mut len) = (vec![0_u8; ADDRESS_MAX], ADDRESS_MAX);
        // SAFETY: the endpoint is open, and the call writes at most as many bytes.
        let result = unsafe {
            let endpoint = open.endpoint.as_ptr();
            ((*(*endpoint).cm).getname)(endpoint.cast(), address.as_mut_ptr().cast(), &raw mut len)
        };
        self.inner.domain.library.check("fi_getname", result as isize)?;
        address.truncate(len);
        Ok(address)
    }

    /// Says at which address the peer is. It sends nothing yet.
    ///
    /// # Errors
    /// Returns that the address is not one of the provider's, or that the endpoint was closed.
    pub fn connect(&self, peer: &[u8]) -> Result<(), FabricError> {
        let library = self.inner.domain.library;
        if !self.inner.domain.is_address(peer) {
            return Err(library.error("fi_av_insert", libc::EINVAL));
        }
        let _calls = library.lock_calls();
        let mut state = self.inner.lock();
        let open = state.open.as_ref().ok_or_else(FabricError::closed)?;
        let mut number = fi::ADDRESS_UNSPECIFIED;
        // SAFETY: the table is open, and the address has the form of the provider's.
        let inserted = unsafe {
            let addresses = open.addresses.as_ptr();
            let insert = (*(*addresses).ops).insert;
            insert(addresses, peer.as_ptr().cast(), 1, &raw mut number, 0, null_mut())
        };
        library.check("fi_av_insert", inserted as isize)?;
        if inserted != 1 {
            return Err(library.error("fi_av_insert", libc::EINVAL));
        }
        state.peer = number;
        Ok(())
    }

    /// Reads bytes of the peer into memory, and calls `then` once: when they are in place, or with the reason why they never will be.
    /// That is on the thread of the fabric, or on the one that closes the endpoint, so `then` must not wait. `local` is the
    /// registration of the memory, if the fabric [needs it](crate::Fabric::needs_local_registration).
    ///
    /// # Errors
    /// Returns that the endpoint was closed, or has no peer: then `then` is dropped uncalled.
    ///
    /// # Safety
    /// Until `then` is called, the memory stays mapped, and nothing else uses it. `local` stays registered as long, and covers it.
    pub unsafe fn read(
        &self,
        into: NonNull<u8>,
        len: usize,
        local: Option<&RegisteredMemory>,
        from: RemoteBytes,
        then: impl FnOnce(Result<(), FabricError>) + Send + 'static,
    ) -> Result<(), FabricError> {
        let mut ended = Ended::new();
        let calls = self.inner.domain.library.lock_calls();
        let mut state = self.inner.lock();
        if state.open.is_none() || state.peer == fi::ADDRESS_UNSPECIFIED {
            return Err(FabricError::closed());
        }
        let descriptor = local.map_or(null_mut(), RegisteredMemory::descriptor);
        let (into, then) = (into.as_ptr().cast(), Box::new(then));
        state.waiting.push_back(Box::new(Read { context: [0; 8], into, len, descriptor, from, then }));
        state.start_waiting(&self.inner.domain, &mut ended);
        drop(state);
        drop(calls);
        report(ended);
        self.inner.domain.sleep.wake();
        Ok(())
    }

    /// Closes the endpoint. When it returns, no read of this side is under way, and no read of the peer through this endpoint; the end
    /// of each was told, or is just being told by the thread of the fabric. Returns false if the library refuses; then nothing is
    /// known of the reads whose end is not told, and their memory must not be used again.
    pub fn close(&self) -> bool {
        self.inner.close()
    }
}

impl Drop for FabricEndpoint {
    fn drop(&mut self) {
        self.inner.close();
    }
}

impl EndpointInner {
    fn lock(&self) -> MutexGuard<'_, EndpointState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes progress. Returns whether reads have ended.
    pub fn poll(&self) -> bool {
        let mut ended = Ended::new();
        let calls = self.domain.library.lock_calls();
        let mut state = self.lock();
        state.take_ended(&self.domain, &mut ended);
        state.start_waiting(&self.domain, &mut ended);
        drop(state);
        drop(calls);
        let moved = !ended.is_empty();
        report(ended);
        moved
    }

    fn close(&self) -> bool {
        let mut ended = Ended::new();
        let calls = self.domain.library.lock_calls();
        let mut state = self.lock();
        // Reads that have ended already count as such.
        state.take_ended(&self.domain, &mut ended);
        let Some(open) = state.open.take() else { return !state.is_close_refused };
        // SAFETY: the endpoint is open, and nothing uses it any more: the state is empty.
        let is_closed =
            unsafe { self.domain.close_fid("fi_close of an endpoint", open.endpoint.as_ptr().cast()) };
        let never_begun = std::mem::take(&mut state.waiting);
        ended.extend(never_begun.into_iter().map(|read| (read.then, Err(FabricError::closed()))));
        if is_closed {
            // A closed endpoint touches no memory of its reads any more. Its results for them are not of interest.
            let given_up = std::mem::take(&mut state.under_way).into_values();
            ended.extend(given_up.map(|read| (read.then, Err(FabricError::closed()))));
            // SAFETY: as above.
            unsafe {
                self.domain.close_fid("fi_close of a queue", open.queue.as_ptr().cast());
                self.domain.close_fid("fi_close of addresses", open.addresses.as_ptr().cast());
            }
        } else {
            state.is_close_refused = true;
            // Memory that the library may use is never freed.
            std::mem::forget(std::mem::take(&mut state.under_way));
        }
        drop(state);
        drop(calls);
        report(ended);
        is_closed
    }
}

impl EndpointState {
    /// Offers the waiting reads to the library, in order, until it takes no more.
    fn start_waiting(&mut self, domain: &Domain, ended: &mut Ended) {
        let Some(open) = &self.open else { return };
        while let Some(mut read) = self.waiting.pop_front() {
            let (into, len, descriptor, from) = (read.into, read.len, read.descriptor, read.from);
            let context = (&raw mut *read).cast::<c_void>();
            // SAFETY: the endpoint is open, the caller guarantees the memory, and the read stays where it is until it has ended.
            let result = unsafe {
                let endpoint = open.endpoint.as_ptr();
                let ask = (*(*endpoint).rma).read;
                ask(endpoint, into, len, descriptor, self.peer, from.address, from.key, context)
            };
            match result {
                0 => drop(self.under_way.insert(context, read)),
                _ if result == -fi::EAGAIN => return self.waiting.push_front(read),
                _ => ended.push((read.then, domain.library.check("fi_read", result))),
            }
        }
    }

    /// Takes the reads that have ended.
    fn take_ended(&mut self, domain: &Domain, ended: &mut Ended) {
        let Some(open) = &self.open else { return };
        let queue = open.queue.as_ptr();
        let mut entries = [fi::QueueEntry { op_context: null_mut() }; ENTRIES];
        // SAFETY: the queue is open, and the call writes at most as many entries.
        let count = unsafe { ((*(*queue).ops).read)(queue, entries.as_mut_ptr().cast(), ENTRIES) };
        if count == -fi::EAVAIL {
            // SAFETY: all zeros is an error without text.
            let mut error: fi::QueueError = unsafe { std::mem::zeroed() };
            // SAFETY: the queue is open, and the call writes one error.
            let found = unsafe { ((*(*queue).ops).readerr)(queue, &raw mut error, 0) };
            if found > 0 {
                let outcome = Err(domain.library.error("fi_read", error.err));
                self.end(error.op_context, outcome, ended);
            }
            return;
        }
        for entry in entries.iter().take(usize::try_from(count).unwrap_or(0)) {
            self.end(entry.op_context, Ok(()), ended);
        }
    }

    /// Notes the end of a read, by its context.
    fn end(&mut self, context: *mut c_void, outcome: Result<(), FabricError>, ended: &mut Ended) {
        // A context is looked up before it is used, whatever the provider passes.
        if let Some(read) = self.under_way.remove(&context) {
            ended.push((read.then, outcome));
        }
    }
}

fn report(ended: Ended) {
    for (then, outcome) in ended {
        then(outcome);
    }
}

impl OpenEndpoint {
    fn open(domain: &Domain) -> Result<Self, FabricError> {
        let (library, handle) = (domain.library, domain.handle.as_ptr());
        let missing = |call| library.error(call, libc::EINVAL);
        // SAFETY: the domain is open; the calls read descriptions and write handles. Handles opened before a failure are closed.
        unsafe {
            let mut queue = null_mut();
            let mut attributes = fi::QueueAttributes {
                size: 0,
                flags: 0,
                format: fi::CQ_FORMAT_CONTEXT,
                wait_obj: fi::WAIT_NONE,
                signaling_vector: 0,
                wait_cond: 0,
                wait_set: null_mut(),
            };
            let opened = ((*(*handle).ops).cq_open)(handle, &raw mut attributes, &raw mut queue, null_mut());
            library.check("fi_cq_open", opened as isize)?;
            let queue = NonNull::new(queue).ok_or_else(|| missing("fi_cq_open"))?;
            let queue = Closing(domain, queue.cast());
            let mut addresses = null_mut();
            let mut attributes = fi::AddressAttributes {
                kind: 0,
                rx_ctx_bits: 0,
                count: 1,
                ep_per_node: 0,
                name: null(),
                map_addr: null_mut(),
                flags: 0,
            };
            let opened =
                ((*(*handle).ops).av_open)(handle, &raw mut attributes, &raw mut addresses, null_mut());
            library.check("fi_av_open", opened as isize)?;
            let addresses = NonNull::new(addresses).ok_or_else(|| missing("fi_av_open"))?;
            let addresses = Closing(domain, addresses.cast());
            let mut endpoint = null_mut();
            let opened =
                ((*(*handle).ops).endpoint)(handle, domain.info.as_ptr(), &raw mut endpoint, null_mut());
            library.check("fi_endpoint", opened as isize)?;
            let endpoint = NonNull::new(endpoint).ok_or_else(|| missing("fi_endpoint"))?;
            let endpoint = Closing(domain, endpoint.cast());
            let fid: *mut fi::Fid = endpoint.1.as_ptr();
            let bind = (*(*fid).ops).bind;
            library.check("fi_ep_bind", bind(fid, addresses.1.as_ptr(), 0) as isize)?;
            let both = fi::BIND_TRANSMIT | fi::BIND_RECV;
            library.check("fi_ep_bind", bind(fid, queue.1.as_ptr(), both) as isize)?;
            let enable = (*(*fid).ops).control;
            library.check("fi_enable", enable(fid, fi::COMMAND_ENABLE, null_mut()) as isize)?;
            // They are closed in the reverse order: the endpoint first.
            Ok(Self {
                endpoint: endpoint.keep().cast(),
                addresses: addresses.keep().cast(),
                queue: queue.keep().cast(),
            })
        }
    }
}

/// A handle that is closed unless it is kept.
struct Closing<'a>(&'a Domain, NonNull<fi::Fid>);

impl Closing<'_> {
    fn keep(self) -> NonNull<fi::Fid> {
        let fid = self.1;
        std::mem::forget(self);
        fid
    }
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        // SAFETY: it is open, and nothing else has it.
        unsafe { self.0.close_fid("fi_close", self.1.as_ptr()) };
    }
}
