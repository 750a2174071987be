//! The HTTP/2 settings of a connection. Begin at [`announced_settings`].

use super::limits::GrpcLimits;
use crate::http2::AnnouncedSettings;

/// The largest frame payload.
const FRAME_MAX: u32 = 2 << 20;
/// The receive window of a stream.
const STREAM_WINDOW: u32 = 2 << 20;
/// The receive window of a connection.
const CONNECTION_WINDOW: u32 = 4 << 20;
/// The largest header list. Clients send a few hundred bytes of headers.
const HEADER_LIST: u32 = 16 << 10;
/// Returns the limits that the server announces.
pub(super) fn announced_settings(limits: &GrpcLimits) -> AnnouncedSettings {
    AnnouncedSettings {
        streams: limits.streams_per_connection,
        frame: FRAME_MAX,
        stream_window: STREAM_WINDOW,
        connection_window: CONNECTION_WINDOW,
        header_list: HEADER_LIST,
        state_bytes: limits.state_bytes_per_connection,
    }
}
