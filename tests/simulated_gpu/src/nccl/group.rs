//! Groups: what a thread collects between group start and group end, and its launch.

use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::Arc;

use super::communicator::Communicator;
use super::operation::{Operation, check_own_messages};
use super::profiler::{LaunchEvents, finish_group_call, note_group_end, trace_call};
use super::{IN_PROGRESS, INVALID_USAGE, NcclAnswer, NcclError, SYSTEM_ERROR, code_of, exchange};
use crate::settings::Setting;
use crate::wait::wait_until;

/// The operations that a thread has collected.
#[derive(Default)]
struct Group {
    depth: u32,
    operations: Vec<Operation>,
    /// Communicators whose start was deferred.
    starting: Vec<Arc<Communicator>>,
    /// The first error of a call of the group, which its end returns.
    error: Option<NcclError>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Notes the error of a call in the thread's group, if there is one.
pub fn note_error(answer: NcclAnswer) -> NcclAnswer {
    if let Err(error) = answer
        && error != IN_PROGRESS
    {
        GROUP.with_borrow_mut(|group| {
            if group.depth > 0 {
                group.error.get_or_insert(error);
            }
        });
    }
    answer
}

/// Starts a communicator, at the end of the thread's group if there is one.
pub fn start_communicator(communicator: Arc<Communicator>) -> NcclAnswer {
    let is_deferred = GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.starting.push(communicator.clone());
        }
        group.depth > 0
    });
    if is_deferred { Ok(()) } else { communicator.start() }
}

/// Adds an operation to the thread's group, or launches it.
pub fn add(mut operation: Operation) -> NcclAnswer {
    // A single operation is a group, too.
    let depth = 1 + GROUP.with_borrow(|group| group.depth);
    trace_call(&mut operation, depth);
    if depth > 1 {
        GROUP.with_borrow_mut(|group| group.operations.push(operation));
        return Ok(());
    }
    end_outermost(|| launch(vec![operation]))
}

/// Ends the outermost group, between the events of its end.
fn end_outermost(body: impl FnOnce() -> NcclAnswer) -> NcclAnswer {
    note_group_end();
    let answer = body();
    finish_group_call();
    answer
}

/// Starts communicators at the same time, and returns the first error.
fn start_all(communicators: Vec<Arc<Communicator>>) -> NcclAnswer {
    let start =
        |communicator: Arc<Communicator>| std::thread::Builder::new().spawn(move || communicator.start());
    let threads: Vec<_> = communicators.into_iter().map(start).collect();
    let mut answer = Ok(());
    for thread in threads {
        let one =
            thread.map_err(|_| SYSTEM_ERROR).and_then(|thread| thread.join().unwrap_or(Err(SYSTEM_ERROR)));
        answer = answer.and(one);
    }
    answer
}

/// Launches operations: those of one communicator are one operation of their stream.
///
/// Stricter: the operations of one group and communicator must name one stream, else error 5.
fn launch(operations: Vec<Operation>) -> NcclAnswer {
    let mut batches: Vec<Vec<Operation>> = Vec::new();
    for operation in operations {
        let same = |batch: &&mut Vec<Operation>| Arc::ptr_eq(&batch[0].communicator, &operation.communicator);
        match batches.iter_mut().find(same) {
            Some(batch) => batch.push(operation),
            None => batches.push(vec![operation]),
        }
    }
    for batch in &batches {
        batch[0].communicator.check_ready()?;
        let is_one_stream = batch.iter().all(|operation| Arc::ptr_eq(&operation.stream, &batch[0].stream));
        if !is_one_stream || !check_own_messages(batch) {
            return Err(INVALID_USAGE);
        }
    }
    let mut answer = Ok(());
    for batch in batches {
        let communicator = batch[0].communicator.clone();
        let number = communicator.next_group();
        let launched = communicator.run_slow_call(move |own| {
            let mut batch = batch;
            if !own.is_blocking {
                wait_until(|| !Setting::NcclHoldLaunches.is_on() || own.is_stopped());
            }
            let stream = batch[0].stream.clone();
            let events = LaunchEvents::start(&mut batch);
            stream.enqueue(move |turn| exchange::run(&batch, number, turn));
            events.stop(own);
            Ok(())
        });
        answer = answer.and(launched);
    }
    answer
}

/// Begins a group. Groups nest; the outermost end launches.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    0
}

/// Ends a group: starts its communicators, or launches its operations. If a call of the group failed, nothing is launched and
/// the error is returned. With a non-blocking communicator the answer is 7, and the operations are on their stream only
/// when the asynchronous error is 0 again. Without a group the error is 5.
///
/// Stricter: communicators and operations in one group are error 5.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    let end = || {
        let group = GROUP.with_borrow_mut(|group| {
            group.depth = group.depth.checked_sub(1).ok_or(INVALID_USAGE)?;
            Ok((group.depth == 0).then(|| std::mem::take(group)))
        })?;
        let Some(group) = group else { return Ok(()) };
        end_outermost(|| match (group.error, group.starting.is_empty(), group.operations.is_empty()) {
            (Some(error), ..) => Err(error),
            (None, false, false) => Err(INVALID_USAGE),
            (None, false, true) => start_all(group.starting),
            (None, true, _) => launch(group.operations),
        })
    };
    code_of(end())
}
