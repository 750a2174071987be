//! The reactor threads, which wait for sockets. Each lane belongs to one reactor.
//!
//! A reactor serves lanes, and the bells by which peers announce frames, or free room, in shared memory. It does not
//! depend on connections. If sending on a lane fails, the reactor first reads what the peer has sent on the lane
//! (`Reactor::drain_and_end_lane`), and then ends the lane. So the peer's last frames are processed. Begin at
//! [`Reactor::add`].

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use crate::io::lane::{Lane, LaneError};
use crate::io::wire::{WireEventHandler, WireWaker};

/// The most events of one `epoll_wait`.
const EVENTS: usize = 64;
/// The event number of the thread's own waker.
const WAKER: u64 = u64::MAX;

/// A reactor thread and its sockets.
pub struct Reactor {
    epoll: OwnedFd,
    waker: OwnedFd,
    woken: AtomicBool,
    stopping: AtomicBool,
    shared: Mutex<ReactorState>,
    next: AtomicUsize,
}

#[derive(Default)]
struct ReactorState {
    lanes: HashMap<u64, Arc<Lane>>,
    /// The sessions whose bells ring here.
    bells: HashMap<u64, Weak<dyn DoorbellHost>>,
    /// The lanes to pump: their output, and their input if they hold a chunk.
    eager: Vec<u64>,
    /// The lanes to pump in both directions, although no edge reported them.
    woken: Vec<u64>,
}

/// A session with a bell, as its reactor sees it.
pub trait DoorbellHost: Send + Sync {
    /// Handles a ring of the bell: the ring has frames to read, or room to write.
    fn on_doorbell_rung(&self);
}

impl WireEventHandler for Reactor {
    fn request_wire_check(&self, seat: u64) {
        self.lock_state().woken.push(seat);
        self.wake_thread();
    }
}

impl Reactor {
    /// Starts a reactor thread.
    pub fn start(name: &str) -> std::io::Result<(Arc<Self>, std::thread::JoinHandle<()>)> {
        let reactor = Arc::new(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            waker: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            woken: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            shared: Mutex::default(),
            next: AtomicUsize::new(0),
        });
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&reactor.epoll, &reactor.waker, epoll::EventData::new_u64(WAKER), flags)?;
        let running = Arc::clone(&reactor);
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || running.run())?;
        Ok((reactor, thread))
    }

    fn lock_state(&self) -> MutexGuard<'_, ReactorState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a lane.
    pub fn add(self: &Arc<Self>, lane: &Arc<Lane>) -> std::io::Result<()> {
        let number = self.next.fetch_add(1, Ordering::Relaxed) as u64;
        let mut shared = self.lock_state();
        if self.stopping.load(Ordering::SeqCst) {
            return Err(std::io::ErrorKind::NotConnected.into());
        }
        lane.set_reactor_slot(number);
        let reactor: Weak<Self> = Arc::downgrade(self);
        lane.wire().set_waker(WireWaker::new(reactor, number));
        shared.lanes.insert(number, Arc::clone(lane));
        let flags =
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let added =
            epoll::add(&self.epoll, lane.wire().descriptor(), epoll::EventData::new_u64(number), flags);
        if added.is_err() {
            shared.lanes.remove(&number);
        }
        Ok(added?)
    }

    /// Adds the bell of a session. The reactor never reads it, because every ring is an edge.
    pub fn add_doorbell(&self, bell: BorrowedFd<'_>, host: Weak<dyn DoorbellHost>) -> std::io::Result<()> {
        let number = self.next.fetch_add(1, Ordering::Relaxed) as u64;
        let mut shared = self.lock_state();
        shared.bells.retain(|_, host| host.strong_count() > 0);
        shared.bells.insert(number, host);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.epoll, bell, epoll::EventData::new_u64(number), flags)?)
    }

    /// Makes the thread send the queued frames of the lane.
    pub fn request_pump(&self, lane: &Arc<Lane>) {
        // A lane without a seat is just being added, and is pumped then.
        if let Some(seat) = lane.reactor_slot() {
            self.lock_state().eager.push(seat);
            self.wake_thread();
        }
    }

    fn wake_thread(&self) {
        if !self.woken.swap(true, Ordering::SeqCst) {
            let _full_is_fine = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
        }
    }

    /// Ends the thread.
    pub fn request_stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.woken.store(false, Ordering::SeqCst);
        self.wake_thread();
    }

    fn run(&self) {
        let mut events = Vec::with_capacity(EVENTS);
        // The lanes with more to read than one turn allows.
        let mut unread: Vec<(u64, Arc<Lane>)> = Vec::new();
        while !self.stopping.load(Ordering::SeqCst) {
            events.clear();
            let wait = if unread.is_empty() { None } else { Timespec::try_from(Duration::ZERO).ok() };
            match epoll::wait(self.epoll.as_fd(), rustix::buffer::spare_capacity(&mut events), wait.as_ref())
            {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
            let mut readable = std::mem::take(&mut unread);
            for event in &events {
                self.on_event(event.data.u64(), event.flags, &mut readable);
            }
            for (number, lane) in readable {
                self.pump_input(number, lane, &mut unread);
            }
            self.pump_requested_lanes(&mut unread);
        }
        let lanes: Vec<_> = self.lock_state().lanes.drain().collect();
        for (_, lane) in lanes {
            lane.close_if_open();
            lane.wait_until_idle();
        }
    }

    /// Handles an event: rings a bell, sends on a lane that has room, and collects a lane that can be read.
    fn on_event(&self, number: u64, flags: epoll::EventFlags, readable: &mut Vec<(u64, Arc<Lane>)>) {
        const ENDS: epoll::EventFlags =
            epoll::EventFlags::RDHUP.union(epoll::EventFlags::HUP).union(epoll::EventFlags::ERR);
        if number == WAKER {
            let mut count = [0; 8];
            let _drained = rustix::io::read(&self.waker, &mut count);
            self.woken.store(false, Ordering::SeqCst);
            return;
        }
        let (lane, bell) = {
            let shared = self.lock_state();
            (shared.lanes.get(&number).cloned(), shared.bells.get(&number).and_then(Weak::upgrade))
        };
        if let Some(host) = bell {
            host.on_doorbell_rung();
        }
        let Some(lane) = lane else { return };
        if flags.intersects(ENDS) {
            lane.mark_hung_up();
        }
        if flags.contains(epoll::EventFlags::OUT)
            && let Err(error) = lane.pump_output()
        {
            return self.drain_and_end_lane(number, &lane, &error);
        }
        if flags.intersects(ENDS.union(epoll::EventFlags::IN))
            && !readable.iter().any(|(other, _)| *other == number)
        {
            readable.push((number, lane));
        }
    }

    /// Reads a lane for one turn, and collects it if there is more.
    fn pump_input(&self, number: u64, lane: Arc<Lane>, unread: &mut Vec<(u64, Arc<Lane>)>) {
        match lane.pump_input() {
            Ok(true) => unread.push((number, lane)),
            Ok(false) => {}
            Err(error) => self.end_lane(number, &lane, &error),
        }
    }

    /// Pumps the lanes that other threads have requested.
    fn pump_requested_lanes(&self, unread: &mut Vec<(u64, Arc<Lane>)>) {
        let (eager, woken) = {
            let mut shared = self.lock_state();
            (std::mem::take(&mut shared.eager), std::mem::take(&mut shared.woken))
        };
        let eager = eager.into_iter().map(|number| (number, false));
        for (number, both) in eager.chain(woken.into_iter().map(|number| (number, true))) {
            let Some(lane) = self.lock_state().lanes.get(&number).cloned() else { continue };
            if let Err(error) = lane.pump_output() {
                self.drain_and_end_lane(number, &lane, &error);
            } else if both || lane.input_needs_pump() {
                self.pump_input(number, lane, unread);
            }
        }
    }

    /// Ends a lane on which sending failed. It reads first what the peer sent before it closed the lane.
    fn drain_and_end_lane(&self, number: u64, lane: &Arc<Lane>, error: &LaneError) {
        const TURNS: usize = 64;
        for _ in 0..TURNS {
            if !matches!(lane.pump_input(), Ok(true)) {
                break;
            }
        }
        self.end_lane(number, lane, error);
    }

    fn end_lane(&self, number: u64, lane: &Arc<Lane>, error: &LaneError) {
        self.lock_state().lanes.remove(&number);
        let _gone = epoll::delete(&self.epoll, lane.wire().descriptor());
        lane.close_if_open();
        lane.wait_until_idle();
        if let Some(host) = lane.host() {
            host.on_lane_over(lane, error);
        }
    }
}
