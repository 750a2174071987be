//! Handles the calls on the key-value store of a run.
//!
//! `key_value_store.rs` has the table and its bounds. When a key is written, the table queues the calls that wait for
//! the key, and `pending_work.rs` sends their answers. Begin at `Run::dispatch_store_call`.

use std::sync::Arc;

use bytes::Bytes;

use super::context::TransitionContext;
use super::event::EventKind;
use super::failure::{Code, Failure};
use super::fatal_gpu_error::FatalGpuError;
use super::ids::{CallId, ConnectionId, TaskId};
use super::key_value_store::{display_key, normalise_key};
use super::request_reply::{Reply, Request};
use super::run::Run;
use super::store_entry::StoreEntry;
use super::waiters::WaitTarget;

/// The key of the preemption notice, which all tasks watch.
pub(super) const PREEMPTION_NOTICE: &[u8] = b"RECEIVED_PREEMPTION_NOTICE";

impl Run {
    pub(super) fn dispatch_store_call(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
        writer: Option<TaskId>,
        request: Request,
    ) {
        let outcome = match request {
            Request::Insert { key, value, overwrite } => {
                self.insert_store_value(cx, &key, value, overwrite, writer)
            }
            Request::Increment { key, by } => {
                let result = self.store.increment(&key, by, cx.now, writer, &cx.settings.bounds);
                result.map(|(sum, discarded)| {
                    cx.defer_free(discarded);
                    Reply::Value(sum)
                })
            }
            Request::Get { key } => match self.store.get(&key) {
                Some(entry) => Ok(Reply::Value(entry.value.clone())),
                None => {
                    if !self.admit_waiter(cx, call, connection) {
                        return;
                    }
                    match self.store.add_waiter(&key, call, &cx.settings.bounds) {
                        Ok(key) => {
                            return self.waiters.insert(call, connection, WaitTarget::Key(key, cx.now));
                        }
                        Err(failure) => Err(failure),
                    }
                }
            },
            Request::TryGet { key } => match self.store.get(&key) {
                Some(entry) => Ok(Reply::Value(entry.value.clone())),
                None => Err(Failure::from_service(
                    Code::NotFound,
                    format!("Config key {} not found.", display_key(&key)),
                )),
            },
            Request::List { directory } => Ok(Reply::Directory(self.store.list_below(&directory))),
            Request::Delete { key } => {
                cx.defer_free(self.store.delete_subtree(&key));
                Ok(Reply::Done)
            }
            _ => Err(Failure::from_service(Code::Internal, "Not a call upon the store.")),
        };
        cx.reply_to_call(call, outcome.map_err(Arc::new));
    }

    pub(super) fn insert_store_value(
        &mut self,
        cx: &mut TransitionContext<'_>,
        key: &[u8],
        value: Bytes,
        overwrite: bool,
        by: Option<TaskId>,
    ) -> Result<Reply, Failure> {
        let entry = StoreEntry::new(value.clone(), cx.now, by);
        let discarded = self.store.insert(key, entry, overwrite, &cx.settings.bounds)?;
        cx.defer_free(discarded);
        if normalise_key(key).as_ref() == PREEMPTION_NOTICE {
            self.noticed_at = Some(cx.now);
            let text = String::from_utf8_lossy(&value[..value.len().min(64)]);
            cx.emit_event(
                EventKind::PreemptionNoticed,
                format!("preemption notice {text}: all tasks agree on a step and save"),
            );
        }
        if FatalGpuError::is_key(&normalise_key(key))
            && let Some(error) = FatalGpuError::parse(&value, by, cx.now)
        {
            let failure = Failure::without_details(Code::Internal, error.describe());
            self.record_first_cause(cx, Some(error.task), &failure);
        }
        Ok(Reply::Done)
    }
}
