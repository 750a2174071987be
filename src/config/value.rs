//! Parses and formats single values: addresses, counts, job specifications, rules.
//!
//! `setting_definitions.rs` declares the settings. Begin at `parse_job_spec`.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::coordination::{AutoExcludeRule, ErrorDelivery, JobName, PEER_JOBS_MAX, TASKS_MAX};

/// A value with its type in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingValue {
    /// A quoted text.
    Text(String),
    /// A number.
    Number(u64),
    /// `true` or `false`.
    Switch(bool),
}

/// Parses an address to listen on.
///
/// # Errors
/// The reason, and the syntax.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    if let Some(port) = text.strip_prefix("localhost:").and_then(|port| port.parse().ok()) {
        return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    }
    let how = "write IP:PORT, such as 127.0.0.1:8476, [::1]:8476, or 0.0.0.0:8476 for every address of this machine";
    Err(match text.strip_prefix(':').map(str::parse::<u16>) {
        Some(Ok(port)) => {
            format!("it names a port only: write 127.0.0.1:{port}, or 0.0.0.0:{port} for every address")
        }
        _ => format!("it is no address: {how} (port 0 picks a free one)"),
    })
}

/// Parses an address to listen on, or `none`.
///
/// # Errors
/// As for [`parse_address`].
pub fn parse_optional_address(text: &str) -> Result<Option<SocketAddr>, String> {
    match text {
        "none" => Ok(None),
        text => parse_address(text).map(Some).map_err(|wrong| format!("{wrong}, or none")),
    }
}

/// Parses a number of tasks.
///
/// # Errors
/// The reason, and the syntax.
pub fn parse_task_count(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(0) => Err("a job needs at least one task".into()),
        Ok(tasks) if tasks <= TASKS_MAX => Ok(tasks),
        Ok(_) => Err(format!("a job has at most {TASKS_MAX} tasks")),
        Err(_) => Err(format!("it is no number of tasks: write a whole number from 1 to {TASKS_MAX}")),
    }
}

/// Parses a number between bounds.
///
/// # Errors
/// The reason, and the syntax.
pub fn parse_count_in_range(text: &str, least: usize, most: usize) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("write a whole number from {least} to {most}")),
    }
}

/// Parses `true` or `false`.
///
/// # Errors
/// The syntax.
pub fn parse_bool(text: &str) -> Result<bool, String> {
    match text {
        "true" | "yes" | "on" | "1" => Ok(true),
        "false" | "no" | "off" | "0" => Ok(false),
        _ => Err("write true or false".into()),
    }
}

/// A job declared by a specification such as `NAME=TASKS`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobSpec {
    /// Its name.
    pub name: JobName,
    /// The number of its tasks.
    pub tasks: u32,
    /// The address of a gRPC listener of its own.
    pub grpc: Option<SocketAddr>,
}

/// Parses `NAME=TASKS` or `NAME=TASKS@ADDR`.
///
/// # Errors
/// The reason, and the syntax.
pub fn parse_job_spec(text: &str) -> Result<JobSpec, String> {
    let (name, rest) = text
        .split_once('=')
        .ok_or("it is no job: write NAME=TASKS, or NAME=TASKS@ADDR for a gRPC listener of its own")?;
    let name = name.parse::<JobName>().map_err(|error| error.to_string())?;
    let (tasks, grpc) = match rest.split_once('@') {
        Some((tasks, address)) => (tasks, Some(parse_address(address)?)),
        None => (rest, None),
    };
    Ok(JobSpec { name, tasks: parse_task_count(tasks)?, grpc })
}

/// Parses the way in which errors are delivered.
///
/// # Errors
/// The words that there are.
pub(super) fn parse_error_delivery(text: &str) -> Result<ErrorDelivery, String> {
    let all = [ErrorDelivery::Auto, ErrorDelivery::Hold, ErrorDelivery::Cancel];
    let named = all.into_iter().find(|delivery| error_delivery_word(*delivery) == text);
    named.ok_or_else(|| "write auto, hold or cancel".into())
}

/// Returns the word for the way in which errors are delivered.
pub(super) fn error_delivery_word(delivery: ErrorDelivery) -> &'static str {
    match delivery {
        ErrorDelivery::Auto => "auto",
        ErrorDelivery::Hold => "hold",
        ErrorDelivery::Cancel => "cancel",
    }
}

/// Parses names of rules separated by commas, or `none`.
///
/// # Errors
/// If a name is unknown.
pub fn parse_auto_exclude_rules(text: &str) -> Result<BTreeSet<AutoExcludeRule>, String> {
    if text == "none" {
        return Ok(BTreeSet::new());
    }
    let rule = |name: &str| {
        let named = AutoExcludeRule::ALL.into_iter().find(|rule| rule.name() == name.trim());
        named.ok_or_else(|| {
            format!(
                "there is no rule {:?}: write some of {}",
                name.trim(),
                format_auto_exclude_rules(&AutoExcludeRule::ALL.into())
            )
        })
    };
    text.split(',').map(rule).collect()
}

/// Formats rules as [`parse_auto_exclude_rules`] reads them.
#[must_use]
pub fn format_auto_exclude_rules(rules: &BTreeSet<AutoExcludeRule>) -> String {
    if rules.is_empty() {
        return "none".into();
    }
    rules.iter().map(|rule| rule.name()).collect::<Vec<_>>().join(",")
}

/// Parses the names of jobs, or `none`.
///
/// # Errors
/// The reason, and the syntax.
pub fn parse_job_names(text: &str) -> Result<BTreeSet<JobName>, String> {
    if text == "none" {
        return Ok(BTreeSet::new());
    }
    let name = |name: &str| name.trim().parse::<JobName>().map_err(|error| error.to_string());
    let names = text.split(',').map(name).collect::<Result<BTreeSet<_>, _>>()?;
    if names.len() > PEER_JOBS_MAX {
        return Err(format!("{} jobs are named: name at most {PEER_JOBS_MAX}", names.len()));
    }
    Ok(names)
}

/// Formats the names of jobs as [`parse_job_names`] reads them.
#[must_use]
pub fn format_job_names(names: &BTreeSet<JobName>) -> String {
    if names.is_empty() {
        return "none".into();
    }
    names.iter().map(JobName::as_str).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_jobs_are_read_as_they_are_shown() {
        let names = parse_job_names("serve, eval").unwrap();
        assert_eq!(format_job_names(&names), "eval,serve");
        assert_eq!(parse_job_names(&format_job_names(&names)), Ok(names));
        assert_eq!(format_job_names(&parse_job_names("none").unwrap()), "none");
        assert!(parse_job_names("Serve").unwrap_err().contains("lower-case"));
        assert!(parse_job_names("").is_err());
        let many = (0..=PEER_JOBS_MAX).map(|n| format!("j{n}")).collect::<Vec<_>>().join(",");
        assert!(parse_job_names(&many).unwrap_err().contains("at most 64"));
    }

    #[test]
    fn addresses_need_an_ip_and_a_port() {
        assert_eq!(parse_address("localhost:1").unwrap(), "127.0.0.1:1".parse().unwrap());
        assert!(parse_address(":8476").unwrap_err().contains("0.0.0.0:8476"));
        assert!(parse_address("host:8476").unwrap_err().contains("IP:PORT"));
        assert!(parse_address("127.0.0.1:99999").is_err());
    }

    #[test]
    fn jobs_are_declared_in_one_word() {
        let job = parse_job_spec("train=8@127.0.0.1:9000").unwrap();
        assert_eq!((job.name.as_str(), job.tasks), ("train", 8));
        assert_eq!(job.grpc, Some("127.0.0.1:9000".parse().unwrap()));
        assert!(parse_job_spec("train").unwrap_err().contains("NAME=TASKS"));
        assert!(parse_job_spec("Train=1").unwrap_err().contains("lower-case"));
        assert!(parse_job_spec("train=0").unwrap_err().contains("at least one"));
        assert!(parse_job_spec("train=1000001").unwrap_err().contains("at most 1000000"));
    }
}
