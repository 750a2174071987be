//! Declares every setting once, with its name, help text, parser and printer.
//!
//! Two tables, [`SERVER_SETTINGS`] and [`JOB_SETTINGS`], define the flag, the environment variable and the key of
//! each setting, and its text in `--help` and in `muster config print`. `load.rs` decides which value takes
//! precedence. Begin at [`SERVER_SETTINGS`].

use std::path::PathBuf;

use crate::coordination::JobSettings;
use crate::engine::Durability;
use crate::http::{AllowedHosts, RedactionPatterns};
use crate::service::AuditFailurePolicy;
use crate::telemetry::log::{self, LogFormat};
use crate::telemetry::traces::{OtlpProtocol, check_collector_endpoint};
use crate::text::{format_exact_duration, parse_duration, parse_positive_duration};
use crate::tls::TlsMode;

use super::ServerConfig;
use super::value::{
    SettingValue, error_delivery_word, format_auto_exclude_rules, format_job_names, parse_address,
    parse_auto_exclude_rules, parse_bool, parse_count_in_range, parse_error_delivery, parse_job_names,
    parse_optional_address,
};

/// One setting of a `T`.
pub struct Setting<T: 'static> {
    /// Its name: the flag without its dashes, and the key in the file.
    pub name: &'static str,
    /// The placeholder of its value in help texts.
    pub placeholder: &'static str,
    /// `--help` shows it and `-h` does not.
    pub is_advanced: bool,
    /// Its help text.
    pub help: &'static str,
    /// Returns its value.
    pub show: fn(&T) -> SettingValue,
    /// Parses its value; the error says what is wrong and what to write instead.
    pub set: fn(&mut T, &str) -> Result<(), String>,
}

/// Returns the environment variable of the setting `name`.
#[must_use]
pub fn environment_variable_name(name: &str) -> String {
    format!("MUSTER_{}", name.to_ascii_uppercase().replace('-', "_"))
}

fn text_value(value: impl ToString) -> SettingValue {
    SettingValue::Text(value.to_string())
}

fn path_value(path: Option<&PathBuf>) -> SettingValue {
    path.map_or_else(|| text_value("none"), |path| text_value(path.display()))
}

fn parse_path(text: &str) -> Option<PathBuf> {
    (text != "none").then(|| text.into())
}

/// Declares a setting that is the path of a file, or none.
macro_rules! path_setting {
    ($name:literal, $help:literal, $($field:ident).+) => {
        Setting {
            name: $name,
            placeholder: "PATH|none",
            is_advanced: false,
            help: $help,
            show: |server| path_value(server.$($field).+.as_ref()),
            set: |server, text| {
                server.$($field).+ = parse_path(text);
                Ok(())
            },
        }
    };
}

/// Declares the TLS mode of a listener as a setting.
macro_rules! tls_mode_setting {
    ($name:literal, $field:ident) => {
        Setting {
            name: $name,
            placeholder: "MODE",
            is_advanced: true,
            help: "Which connections are taken there: required (TLS), optional (TLS and plaintext), off (plaintext), or \
                   auto (required if there is a certificate)",
            show: |server| text_value(server.$field.mode),
            set: |server, text| TlsMode::parse(text).map(|value| server.$field.mode = value),
        }
    };
}

/// The settings of the server.
pub static SERVER_SETTINGS: [Setting<ServerConfig>; 47] = [
    Setting {
        name: "grpc",
        placeholder: "ADDR",
        is_advanced: false,
        help: "Where JAX clients connect; port 0 picks a free one",
        show: |server| text_value(server.grpc),
        set: |server, text| parse_address(text).map(|value| server.grpc = value),
    },
    Setting {
        name: "grpc-connections",
        placeholder: "COUNT",
        is_advanced: true,
        help: "gRPC connections at once; more are closed at once",
        show: |server| SettingValue::Number(server.grpc_limits.connections as u64),
        set: |server, text| {
            parse_count_in_range(text, 1, 1 << 24).map(|value| server.grpc_limits.connections = value)
        },
    },
    Setting {
        name: "grpc-streams",
        placeholder: "COUNT",
        is_advanced: true,
        help: "gRPC calls in progress at once on one connection",
        show: |server| SettingValue::Number(u64::from(server.grpc_limits.streams_per_connection)),
        set: |server, text| {
            parse_count_in_range(text, 1, 1 << 24).map(|value| {
                server.grpc_limits.streams_per_connection = u32::try_from(value).unwrap_or(u32::MAX)
            })
        },
    },
    Setting {
        name: "grpc-message-bytes",
        placeholder: "BYTES",
        is_advanced: true,
        help: "Length of one gRPC message, after inflation",
        show: |server| SettingValue::Number(server.grpc_limits.message_bytes as u64),
        set: |server, text| {
            parse_count_in_range(text, 4 << 10, 2 << 30).map(|value| server.grpc_limits.message_bytes = value)
        },
    },
    Setting {
        name: "grpc-bodies-bytes",
        placeholder: "BYTES",
        is_advanced: true,
        help: "Memory for gRPC requests that arrive in pieces, over all connections; more wait their turn",
        show: |server| SettingValue::Number(server.grpc_limits.bodies_in_flight_bytes as u64),
        set: |server, text| {
            parse_count_in_range(text, 4 << 10, 1 << 40)
                .map(|value| server.grpc_limits.bodies_in_flight_bytes = value)
        },
    },
    Setting {
        name: "grpc-connection-state-bytes",
        placeholder: "BYTES",
        is_advanced: true,
        help: "Memory for the requests in progress on one gRPC connection; what would need more is refused",
        show: |server| SettingValue::Number(server.grpc_limits.state_bytes_per_connection as u64),
        set: |server, text| {
            parse_count_in_range(text, 64 << 10, 1 << 40)
                .map(|value| server.grpc_limits.state_bytes_per_connection = value)
        },
    },
    Setting {
        name: "grpc-state-bytes",
        placeholder: "BYTES",
        is_advanced: true,
        help: "Memory for the requests in progress on all gRPC connections, beyond the first 16 KiB of each",
        show: |server| SettingValue::Number(server.grpc_limits.state_bytes as u64),
        set: |server, text| {
            parse_count_in_range(text, 64 << 10, 1 << 40).map(|value| server.grpc_limits.state_bytes = value)
        },
    },
    Setting {
        name: "grpc-unsent-bytes",
        placeholder: "BYTES",
        is_advanced: true,
        help: "Answers that one gRPC client has not taken yet; with more, its calls wait",
        show: |server| SettingValue::Number(server.grpc_limits.unsent_bytes_per_connection as u64),
        set: |server, text| {
            parse_count_in_range(text, 4 << 10, 1 << 40)
                .map(|value| server.grpc_limits.unsent_bytes_per_connection = value)
        },
    },
    Setting {
        name: "http",
        placeholder: "ADDR",
        is_advanced: false,
        help: "Where people and tools look: health, version and the REST API; port 0 picks a free one",
        show: |server| text_value(server.http),
        set: |server, text| parse_address(text).map(|value| server.http = value),
    },
    Setting {
        name: "http-connections",
        placeholder: "COUNT",
        is_advanced: true,
        help: "How many HTTP connections are served at once; those without a request make room for more",
        show: |server| SettingValue::Number(server.http_connections as u64),
        set: |server, text| {
            parse_count_in_range(text, 1, 1 << 16).map(|value| server.http_connections = value)
        },
    },
    Setting {
        name: "http-connections-per-source",
        placeholder: "COUNT",
        is_advanced: true,
        help: "How many HTTP connections one address (one /64 network of IPv6) may have at once",
        show: |server| SettingValue::Number(server.http_connections_per_source as u64),
        set: |server, text| {
            parse_count_in_range(text, 1, 1 << 16).map(|value| server.http_connections_per_source = value)
        },
    },
    Setting {
        name: "http-bodies-bytes",
        placeholder: "BYTES",
        is_advanced: true,
        help: "Memory for the bodies of HTTP requests, a quarter of it for one address; more are refused",
        show: |server| SettingValue::Number(server.http_bodies_bytes as u64),
        set: |server, text| {
            parse_count_in_range(text, 2 << 20, 1 << 40).map(|value| server.http_bodies_bytes = value)
        },
    },
    Setting {
        name: "health",
        placeholder: "ADDR|none",
        is_advanced: false,
        help: "A separate plaintext listener, without authentication, for /healthz/live and /healthz/ready, which the HTTP port \
               serves too; port 0 picks a free one",
        show: |server| server.health.map_or_else(|| text_value("none"), text_value),
        set: |server, text| parse_optional_address(text).map(|value| server.health = value),
    },
    Setting {
        name: "http-streams",
        placeholder: "COUNT",
        is_advanced: true,
        help: "How many streams of events are served at once; more are refused",
        show: |server| SettingValue::Number(server.http_streams as u64),
        set: |server, text| parse_count_in_range(text, 1, 1 << 16).map(|value| server.http_streams = value),
    },
    Setting {
        name: "metrics",
        placeholder: "ADDR|none",
        is_advanced: false,
        help: "Where /metrics is served as well as on the HTTP port, on a listener of its own; port 0 picks a free one",
        show: |server| server.metrics.map_or_else(|| text_value("none"), text_value),
        set: |server, text| parse_optional_address(text).map(|value| server.metrics = value),
    },
    Setting {
        name: "task-metrics-max",
        placeholder: "COUNT",
        is_advanced: true,
        help: "Jobs with more tasks than this have no metrics for each task",
        show: |server| SettingValue::Number(server.task_metrics_max as u64),
        set: |server, text| {
            parse_count_in_range(text, 0, 1 << 20).map(|value| server.task_metrics_max = value)
        },
    },
    Setting {
        name: "rpc-metrics",
        placeholder: "true|false",
        is_advanced: true,
        help: "Count and time calls by method",
        show: |server| SettingValue::Switch(server.grpc_limits.count_calls),
        set: |server, text| parse_bool(text).map(|value| server.grpc_limits.count_calls = value),
    },
    Setting {
        name: "otlp-endpoint",
        placeholder: "URL|none",
        is_advanced: true,
        help: "Where traces are sent by OTLP, such as http://HOST:4317; without it, OTEL_EXPORTER_OTLP_ENDPOINT says so",
        show: |server| server.otlp_endpoint.as_ref().map_or_else(|| text_value("none"), text_value),
        set: |server, text| {
            server.otlp_endpoint = match text {
                "none" => None,
                text => Some(check_collector_endpoint(text).map(|()| text.to_owned())?),
            };
            Ok(())
        },
    },
    Setting {
        name: "otlp-protocol",
        placeholder: "grpc|http",
        is_advanced: true,
        help: "How traces are sent to --otlp-endpoint",
        show: |server| text_value(server.otlp_protocol),
        set: |server, text| OtlpProtocol::parse(text).map(|value| server.otlp_protocol = value),
    },
    Setting {
        name: "io-threads",
        placeholder: "COUNT",
        is_advanced: true,
        help: "Threads that serve connections",
        show: |server| SettingValue::Number(server.io_threads as u64),
        set: |server, text| parse_count_in_range(text, 1, 1 << 10).map(|value| server.io_threads = value),
    },
    Setting {
        name: "jobs-max",
        placeholder: "COUNT",
        is_advanced: true,
        help: "How many jobs there may be, those that are made at run time included",
        show: |server| SettingValue::Number(server.jobs_max as u64),
        set: |server, text| parse_count_in_range(text, 1, 1 << 20).map(|value| server.jobs_max = value),
    },
    Setting {
        name: "collective-stuck-after",
        placeholder: "DURATION",
        is_advanced: true,
        help: "How long the GPUs of a collective may wait for one of them before there is a finding",
        show: |server| text_value(format_exact_duration(server.collective_stuck_after)),
        set: |server, text| parse_duration(text).map(|value| server.collective_stuck_after = value),
    },
    Setting {
        name: "stop-timeout",
        placeholder: "DURATION",
        is_advanced: true,
        help: "How long open connections may take to finish when the server stops",
        show: |server| text_value(format_exact_duration(server.stop_timeout)),
        set: |server, text| parse_duration(text).map(|value| server.stop_timeout = value),
    },
    Setting {
        name: "log",
        placeholder: "FILTER",
        is_advanced: false,
        help: "What is logged: error, warn, info, debug, trace or off, or a filter such as \
               'info,muster::events=warn' (every change of state is an event)",
        show: |server| text_value(&server.log),
        set: |server, text| log::check_log_filter(text).map(|()| server.log = text.into()),
    },
    Setting {
        name: "audit-lines",
        placeholder: "COUNT",
        is_advanced: true,
        help: "How many lines of the audit are kept in memory; older ones are only in --audit-file",
        show: |server| SettingValue::Number(server.audit_lines as u64),
        set: |server, text| parse_count_in_range(text, 1, 1 << 20).map(|value| server.audit_lines = value),
    },
    Setting {
        name: "log-format",
        placeholder: "FORMAT",
        is_advanced: false,
        help: "How log lines look: human or json",
        show: |server| text_value(server.log_format),
        set: |server, text| LogFormat::parse(text).map(|value| server.log_format = value),
    },
    Setting {
        name: "data-dir",
        placeholder: "FOLDER|auto",
        is_advanced: false,
        help: "The folder of the journal, by which jobs and runs survive this process; auto: muster/HOST/grpc-PORT in the user's \
               state folder, or none if the gRPC port is 0",
        show: |server| {
            server.data_dir.as_ref().map_or_else(|| text_value("auto"), |path| text_value(path.display()))
        },
        set: |server, text| {
            server.data_dir = (text != "auto").then(|| text.into());
            Ok(())
        },
    },
    Setting {
        name: "durability",
        placeholder: "none|process|host",
        is_advanced: false,
        help: "What every answer has survived when it leaves: the death of this process (process), the loss of this host, at \
               the cost of a write to the disk (host), or nothing, without a journal (none)",
        show: |server| text_value(server.durability),
        set: |server, text| Durability::parse(text).map(|value| server.durability = value),
    },
    Setting {
        name: "ephemeral",
        placeholder: "true|false",
        is_advanced: false,
        help: "Keep no journal: the end of this process ends all runs",
        show: |server| SettingValue::Switch(server.ephemeral),
        set: |server, text| parse_bool(text).map(|value| server.ephemeral = value),
    },
    Setting {
        name: "no-keeper",
        placeholder: "true|false",
        is_advanced: true,
        help: "Serve from this process, which nobody starts again when it dies. By default, if there is a journal, it holds the \
               listening sockets, and starts another process that serves",
        show: |server| SettingValue::Switch(server.no_keeper),
        set: |server, text| parse_bool(text).map(|value| server.no_keeper = value),
    },
    path_setting!(
        "audit-file",
        "Append a line of JSON to this file for everything that an operator does; the last lines are at /api/v1/audit in \
         any case",
        audit_file
    ),
    Setting {
        name: "audit-failure",
        placeholder: "continue|refuse",
        is_advanced: true,
        help: "While --audit-file cannot be written: continue (changes are made, and their lines wait) or refuse (changes are \
               answered with 503)",
        show: |server| text_value(server.audit_failure),
        set: |server, text| AuditFailurePolicy::parse(text).map(|value| server.audit_failure = value),
    },
    Setting {
        name: "redact-keys",
        placeholder: "GLOB,...|none",
        is_advanced: true,
        help: "Keys whose values the REST API does not show; * stands for any text",
        show: |server| text_value(&server.redact_keys),
        set: |server, text| RedactionPatterns::parse(text).map(|value| server.redact_keys = value),
    },
    path_setting!(
        "grpc-tls-cert",
        "The certificate of the gRPC listeners (PEM, with those in between)",
        grpc_tls.cert
    ),
    path_setting!("grpc-tls-key", "Its key (PEM); both are read again when they change", grpc_tls.key),
    path_setting!(
        "grpc-tls-client-ca",
        "The authorities whose clients may connect (mutual TLS); none: clients are not asked",
        grpc_tls.client_ca
    ),
    tls_mode_setting!("grpc-tls-mode", grpc_tls),
    path_setting!(
        "http-tls-cert",
        "The certificate of the HTTP listener (PEM, with those in between)",
        http_tls.cert
    ),
    path_setting!("http-tls-key", "Its key (PEM); both are read again when they change", http_tls.key),
    path_setting!(
        "http-tls-client-ca",
        "The authorities whose clients may connect; none: clients are not asked",
        http_tls.client_ca
    ),
    tls_mode_setting!("http-tls-mode", http_tls),
    Setting {
        name: "http-hosts",
        placeholder: "NAME,...|none",
        is_advanced: false,
        help: "Names by which people and tools reach the HTTP address, besides localhost and IP addresses; *.NAME stands for \
               all names below one",
        show: |server| text_value(&server.http_hosts),
        set: |server, text| AllowedHosts::parse(text).map(|value| server.http_hosts = value),
    },
    path_setting!(
        "tokens-file",
        "Who may do what over HTTP: see `muster token new`; without it everybody may do everything. It is read again \
         when it changes",
        tokens_file
    ),
    Setting {
        name: "session-timeout",
        placeholder: "DURATION",
        is_advanced: true,
        help: "How long a login in a browser holds",
        show: |server| text_value(format_exact_duration(server.session_timeout)),
        set: |server, text| parse_positive_duration(text).map(|value| server.session_timeout = value),
    },
    Setting {
        name: "http-changes-per-second",
        placeholder: "COUNT",
        is_advanced: true,
        help: "How many changes one actor may ask for in a second, over HTTP",
        show: |server| SettingValue::Number(server.http_changes_per_second as u64),
        set: |server, text| {
            parse_count_in_range(text, 1, 1 << 20).map(|value| server.http_changes_per_second = value)
        },
    },
    Setting {
        name: "insecure",
        placeholder: "true|false",
        is_advanced: false,
        help: "Let other machines use the HTTP address without saying who they are",
        show: |server| SettingValue::Switch(server.insecure),
        set: |server, text| parse_bool(text).map(|value| server.insecure = value),
    },
    Setting {
        name: "insecure-grpc",
        placeholder: "true|false",
        is_advanced: false,
        help: "Let other machines use the gRPC addresses without saying who they are: needed for clients that speak only \
               plaintext (jaxlib before 0.11.2)",
        show: |server| SettingValue::Switch(server.insecure_grpc),
        set: |server, text| parse_bool(text).map(|value| server.insecure_grpc = value),
    },
];

/// The settings of a job.
pub static JOB_SETTINGS: [Setting<JobSettings>; 9] = [
    Setting {
        name: "recoverable",
        placeholder: "true|false",
        is_advanced: false,
        help: "Tasks may fail and come back without ending the run",
        show: |job| SettingValue::Switch(job.recoverable),
        set: |job, text| parse_bool(text).map(|value| job.recoverable = value),
    },
    Setting {
        name: "heartbeat-timeout",
        placeholder: "DURATION",
        is_advanced: false,
        help: "A task that gives no sign of life for this long has failed",
        show: |job| text_value(format_exact_duration(job.heartbeat_timeout)),
        set: |job, text| parse_positive_duration(text).map(|value| job.heartbeat_timeout = value),
    },
    Setting {
        name: "register-timeout",
        placeholder: "DURATION",
        is_advanced: false,
        help: "How long tasks wait for one another when they register",
        show: |job| text_value(format_exact_duration(job.register_timeout)),
        set: |job, text| parse_positive_duration(text).map(|value| job.register_timeout = value),
    },
    Setting {
        name: "shutdown-timeout",
        placeholder: "DURATION",
        is_advanced: false,
        help: "How long tasks wait for one another when they shut down; 0s: not at all",
        show: |job| text_value(format_exact_duration(job.shutdown_timeout)),
        set: |job, text| parse_duration(text).map(|value| job.shutdown_timeout = value),
    },
    Setting {
        name: "disconnect-grace",
        placeholder: "DURATION|off",
        is_advanced: false,
        help: "How long a task whose connection broke may take to be heard again; off: only heartbeats count",
        show: |job| {
            job.disconnect_grace
                .map_or_else(|| text_value("off"), |grace| text_value(format_exact_duration(grace)))
        },
        set: |job, text| {
            let value = match text {
                "off" => None,
                text => Some(parse_duration(text).map_err(|wrong| format!("{wrong}, or off"))?),
            };
            job.disconnect_grace = value;
            Ok(())
        },
    },
    Setting {
        name: "error-delivery",
        placeholder: "auto|hold|cancel",
        is_advanced: false,
        help: "How errors reach tasks: hold (at once, by a held poll), cancel (with the next heartbeat; clients \
               survive a lost connection), or auto (cancel for recoverable jobs, hold otherwise)",
        show: |job| text_value(error_delivery_word(job.error_delivery)),
        set: |job, text| parse_error_delivery(text).map(|value| job.error_delivery = value),
    },
    Setting {
        name: "auto-exclude",
        placeholder: "RULE,...|none",
        is_advanced: true,
        help: "Findings upon which the server itself excludes the task that they name, in recoverable jobs: \
               stalled-task, chronic-straggler, restart-storm, fatal-gpu-error, collective-stuck (only if times on the GPU \
               show that one task alone is the cause)",
        show: |job| text_value(format_auto_exclude_rules(&job.auto_exclude)),
        set: |job, text| parse_auto_exclude_rules(text).map(|rules| job.auto_exclude = rules),
    },
    Setting {
        name: "auto-exclude-for",
        placeholder: "DURATION",
        is_advanced: true,
        help: "How long the exclusions last that the server makes itself",
        show: |job| text_value(format_exact_duration(job.auto_exclude_for)),
        set: |job, text| parse_positive_duration(text).map(|value| job.auto_exclude_for = value),
    },
    Setting {
        name: "transfers-with",
        placeholder: "JOB,...|none",
        is_advanced: true,
        help: "The jobs of this server whose tasks may exchange transfers with those of this job, such as weights from \
               training to inference; both jobs must name each other",
        show: |job| text_value(format_job_names(&job.transfers_with)),
        set: |job, text| parse_job_names(text).map(|names| job.transfers_with = names),
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServerProfile;

    fn setting_value_text(shown: SettingValue) -> String {
        match shown {
            SettingValue::Text(text) => text,
            SettingValue::Number(number) => number.to_string(),
            SettingValue::Switch(switch) => switch.to_string(),
        }
    }

    #[test]
    fn every_default_reads_back_as_it_is_shown() {
        let mut server = ServerConfig::new(ServerProfile::Serve);
        for key in &SERVER_SETTINGS {
            (key.set)(&mut server, &setting_value_text((key.show)(&ServerConfig::new(ServerProfile::Serve))))
                .unwrap();
        }
        assert_eq!(server, ServerConfig::new(ServerProfile::Serve));
        let mut job = JobSettings::new(1);
        for key in &JOB_SETTINGS {
            (key.set)(&mut job, &setting_value_text((key.show)(&JobSettings::new(1)))).unwrap();
        }
        assert_eq!(job, JobSettings::new(1));
    }
}
