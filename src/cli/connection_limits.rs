//! Raises the limit on open files and divides it among the listeners.
//!
//! Begin at `compute_connection_limits`.

use anyhow::{Result, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::{Config, ServerConfig};
use crate::http::descriptors_needed;

/// Files that the service opens besides connections: listeners, the log, the audit, certificates, /proc, a
/// trace collector.
const RESERVED_FILES: usize = 64;
/// The minimum limit with which the service starts.
const OPEN_FILES_MIN: usize = 160;
/// HTTP gets one part in this many of a limit that is too low for all listeners.
const HTTP_SHARE: usize = 4;
/// The maximum number of connections to a listener for health or metrics alone.
const AUXILIARY_CONNECTIONS: usize = 64;
/// The same if the limit on open files is low.
const AUXILIARY_CONNECTIONS_MIN: usize = 8;

/// Raises the soft limit on open files to the hard one, because every connection is a file. Returns the old
/// limit, which children get back.
pub fn raise_open_file_limit() -> Rlimit {
    let old = getrlimit(Resource::Nofile);
    let new = Rlimit { current: old.maximum, maximum: old.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, new) {
        tracing::warn!(%error, limit = ?old.current, "cannot raise the limit on open files");
    }
    old
}

/// Sets the soft limit on open files, at most to the hard one.
pub fn set_open_file_limit(soft: u64) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // If the limit cannot be lowered, the present one stays.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(soft), maximum });
}

/// The maximum number of connections of each kind of listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    pub grpc: usize,
    pub http: usize,
    /// For the listeners for health and for metrics.
    pub auxiliary: usize,
}

/// Computes the maximum number of connections, so that an accept never fails for lack of files: the
/// configured number, or as many as the limit on open files allows.
///
/// # Errors
/// If the limit is too low to serve at all.
pub fn compute_connection_limits(config: &Config) -> Result<ConnectionLimits> {
    let limit = getrlimit(Resource::Nofile).current;
    let limit = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    let own = config.jobs.iter().filter(|job| job.grpc.is_some()).count();
    let fitting = fit_limits_to_open_files(&config.server, limit, own)?;
    let wanted = (config.server.grpc_limits.connections, config.server.http_connections);
    if (fitting.grpc, fitting.http) != wanted {
        let told = format!(
            "the limit on open files allows {} gRPC connections and {} HTTP connections at once, not {} and {}: raise it (ulimit \
             -n, LimitNOFILE of systemd), or set --grpc-connections and --http-connections lower",
            fitting.grpc, fitting.http, wanted.0, wanted.1
        );
        let tasks: u64 = config.jobs.iter().map(|job| u64::from(job.settings.tasks)).sum();
        // A task has one connection, and two while it reconnects.
        if (fitting.grpc as u64) < tasks.saturating_mul(2) {
            tracing::warn!(open_files = limit, tasks, "{told}");
        } else {
            tracing::info!(open_files = limit, tasks, "{told}");
        }
    }
    Ok(fitting)
}

fn fit_limits_to_open_files(
    server: &ServerConfig,
    limit: usize,
    own_listeners: usize,
) -> Result<ConnectionLimits> {
    let own = RESERVED_FILES + own_listeners;
    if limit < OPEN_FILES_MIN + own_listeners {
        bail!(
            "the limit on open files is {limit}, and the service needs {} at least: raise it (ulimit -n, LimitNOFILE of systemd, \
             --ulimit nofile of a container)",
            OPEN_FILES_MIN + own_listeners
        );
    }
    let left = limit - own;
    let listeners = [server.health, server.metrics].into_iter().flatten().count();
    let wanted = ConnectionLimits {
        grpc: server.grpc_limits.connections,
        http: server.http_connections,
        auxiliary: AUXILIARY_CONNECTIONS.min(server.http_connections),
    };
    let needed = |fitting: &ConnectionLimits| {
        // One more connection is accepted to be refused.
        fitting.grpc.saturating_add(
            1 + descriptors_needed(fitting.http) + listeners * descriptors_needed(fitting.auxiliary),
        )
    };
    if needed(&wanted) <= left {
        return Ok(wanted);
    }
    let few = left < 1 << 10;
    let side = if few { wanted.auxiliary.min(AUXILIARY_CONNECTIONS_MIN) } else { wanted.auxiliary };
    let mut http = wanted.http;
    while http > 1 && descriptors_needed(http) > left / HTTP_SHARE {
        http -= 1;
    }
    let without = ConnectionLimits { grpc: 0, http, auxiliary: side };
    let grpc = left.saturating_sub(needed(&without)).min(wanted.grpc);
    Ok(ConnectionLimits { grpc, ..without })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServerProfile;

    #[test]
    fn bounds_follow_the_limit_on_open_files() {
        let mut server = ServerConfig::new(ServerProfile::Serve);
        server.health = Some(([127, 0, 0, 1], 1).into());
        let wanted = (server.grpc_limits.connections, server.http_connections);
        let enough = fit_limits_to_open_files(&server, 1 << 20, 0).unwrap();
        assert_eq!((enough.grpc, enough.http, enough.auxiliary), (wanted.0, wanted.1, AUXILIARY_CONNECTIONS));
        for limit in [OPEN_FILES_MIN, 256, 1024, 4096, 65_536] {
            let fitting = fit_limits_to_open_files(&server, limit, 0).unwrap();
            let files = fitting.grpc
                + 1
                + descriptors_needed(fitting.http)
                + descriptors_needed(fitting.auxiliary)
                + RESERVED_FILES;
            assert!(files <= limit, "{limit}: {fitting:?} need {files}");
            assert!(
                fitting.grpc >= limit / 8 && fitting.http >= (limit / 32).min(wanted.1),
                "{limit}: {fitting:?}"
            );
            assert!(fitting.http <= wanted.1);
        }
        let refused = fit_limits_to_open_files(&server, OPEN_FILES_MIN - 1, 0).unwrap_err().to_string();
        assert!(refused.contains("159") && refused.contains("ulimit -n"), "{refused}");
    }
}
