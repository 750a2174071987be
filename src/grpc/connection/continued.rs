//! Makes a connection of the state of one that a former process served. Begin at [`GrpcConnection::continue_from`].

use std::sync::Arc;

use super::GrpcConnection;
use crate::grpc::call_table::{CallTable, ReceivingCallEntry, WaitingCallEntry};
use crate::grpc::connection_settings::announced_settings;
use crate::grpc::connection_socket::ConnectionSocket;
use crate::grpc::continued_connections::SavedConnection;
use crate::grpc::job_resolver::ListenerJobRule;
use crate::grpc::kept_log::{KeptLog, SavedCall};
use crate::grpc::open_connections::ConnectionGuard;
use crate::grpc::server::GrpcServer;
use crate::http2::{Http2Receiver, Http2Sender, OverBudget};

impl<T: ConnectionSocket> GrpcConnection<T> {
    /// Continues a connection of a former process.
    ///
    /// # Errors
    /// In words, if this process cannot continue it.
    pub(in crate::grpc) fn continue_from(
        server: Arc<GrpcServer>,
        socket: T,
        saved: SavedConnection,
        mut kept: Box<KeptLog>,
        routing: ListenerJobRule,
        place: ConnectionGuard,
    ) -> Result<Self, String> {
        let (settings, pool) = (announced_settings(&server.limits), Arc::clone(&server.state));
        // A stopped peer may leave output unread; see `adjust_tcp_user_timeout`.
        let is_user_timeout_off = !saved.output.is_empty() || !saved.queues.is_empty();
        let unacknowledged = Some(server.limits.unacknowledged).filter(|_| !is_user_timeout_off);
        socket.set_tcp_user_timeout(unacknowledged);
        let SavedConnection { origin, turn, input, output, calls: waiting, requests, queues } = saved;
        let mut calls = CallTable::with_id(server, origin.connection, routing, Arc::clone(place.mailbox()));
        let receiver = Http2Receiver::restore(turn.receiver);
        let mut sender = Http2Sender::restore(settings, pool, turn.sender, origin.output_offset, &output);
        let over_budget = |over: OverBudget| over.to_string();
        for SavedCall { stream, call, job, form, due, state } in waiting.into_values() {
            sender.restore_stream(stream, state, None).map_err(over_budget)?;
            let entry = WaitingCallEntry { stream, call, job, form: &form, due: due.instant() };
            calls.continue_waiting_call(&mut sender, &entry);
        }
        for (stream, (state, frames)) in queues {
            sender.restore_stream(stream, state, Some(frames)).map_err(over_budget)?;
        }
        for (request, body) in requests.into_values() {
            sender.restore_stream(request.stream, request.state, None).map_err(over_budget)?;
            calls.continue_receiving_call(
                &mut sender,
                &ReceivingCallEntry {
                    stream: request.stream,
                    path: &request.path,
                    job: request.job,
                    due: request.due.instant(),
                    compresses: request.compresses,
                    is_ended: request.is_ended,
                    unreleased: request.unreleased,
                    body: vec![&body],
                },
            )?;
        }
        calls.watch_changes();
        sender.watch_changes();
        kept.begin_to_catch_up();
        let connection = Self::with_parts(calls, socket, receiver, sender, place);
        let has_peer_goaway = turn.has_peer_goaway;
        Ok(Self { unread_input: input, has_peer_goaway, is_user_timeout_off, kept: Some(kept), ..connection })
    }
}
