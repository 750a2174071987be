//! The thread of a device, which makes all calls of NCCL for it but blocking starts and ends. Begin at [`serve`].

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use muster_gpu::{become_reporting_thread, pause_before_next_query};

use crate::member::{LocalMember, MemberProgress};
use crate::sync::lock;

#[derive(Default)]
struct Served {
    members: Vec<Arc<LocalMember>>,
    /// Whether something was added since the last round.
    is_changed: bool,
}

/// The thread of one device.
#[derive(Default)]
pub struct DeviceThread {
    served: Mutex<Served>,
    changed: Condvar,
}

/// Gives a member to the thread of its device, which the first one starts. It runs as long as the process.
///
/// # Errors
/// Returns why the thread cannot be started.
pub fn serve(member: &Arc<LocalMember>) -> std::io::Result<Arc<DeviceThread>> {
    static THREADS: Mutex<Option<HashMap<u32, Arc<DeviceThread>>>> = Mutex::new(None);
    let mut threads = lock(&THREADS);
    let threads = threads.get_or_insert_default();
    let device = member.gpu.ordinal();
    let thread = if let Some(thread) = threads.get(&device) {
        Arc::clone(thread)
    } else {
        let thread = Arc::new(DeviceThread::default());
        let running = Arc::clone(&thread);
        std::thread::Builder::new().name(format!("muster-nccl-{device}")).spawn(move || running.run())?;
        threads.insert(device, Arc::clone(&thread));
        thread
    };
    let mut served = lock(&thread.served);
    served.members.push(Arc::clone(member));
    drop(served);
    thread.wake();
    Ok(thread)
}

impl DeviceThread {
    /// Makes the thread look at its members again.
    pub fn wake(&self) {
        lock(&self.served).is_changed = true;
        self.changed.notify_one();
    }

    fn run(&self) {
        // Its listeners may drop memory, and to free that would wait for operations that wait for peers.
        become_reporting_thread();
        let mut idle_rounds = 0;
        loop {
            let mut served = lock(&self.served);
            served.is_changed = false;
            let members = served.members.clone();
            drop(served);
            let outcomes: Vec<_> = members.iter().map(|member| member.step()).collect();
            // A member that is over is not kept by a thread that sleeps.
            drop(members);
            let mut served = lock(&self.served);
            // Only this thread removes members, so the first ones are those of this round.
            let mut rest = outcomes.iter();
            served.members.retain(|_| rest.next() != Some(&MemberProgress::Ended));
            if outcomes.contains(&MemberProgress::Progress) {
                drop(served);
                idle_rounds = 0;
                continue;
            }
            if !outcomes.contains(&MemberProgress::Pending) {
                while !served.is_changed {
                    served = self.changed.wait(served).unwrap_or_else(PoisonError::into_inner);
                }
                idle_rounds = 0;
                continue;
            }
            idle_rounds = u32::saturating_add(idle_rounds, 1);
            let Some(pause) = pause_before_next_query(idle_rounds) else {
                drop(served);
                std::thread::yield_now();
                continue;
            };
            if !served.is_changed {
                drop(self.changed.wait_timeout(served, pause).unwrap_or_else(PoisonError::into_inner));
            }
        }
    }
}
