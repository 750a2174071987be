//! Parses and formats the durations in settings, flags and requests. Such a duration has a unit. A formatted duration
//! parses to the same duration.
//!
//! [`super::format_approximate_duration`] and [`super::format_micros`] format rounded durations for people. Begin at
//! [`parse_duration`].

use std::time::Duration;

/// The longest accepted duration, so that adding it to the time never overflows.
const DURATION_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

const DURATION_SYNTAX: &str = "write a number and a unit, such as 500ms, 5s, 2m or 1h";

/// Parses a duration such as `500ms`, `5s` or `1m30s`.
///
/// # Errors
/// Returns what is wrong with the text and how to write a duration.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    if text.parse::<f64>().is_ok() {
        return Err(format!("it has no unit: {DURATION_SYNTAX}"));
    }
    let duration =
        humantime::parse_duration(text).map_err(|_| format!("it is no duration: {DURATION_SYNTAX}"))?;
    if duration > DURATION_MAX {
        return Err("it is longer than a year: give a shorter one".into());
    }
    Ok(duration)
}

/// Parses a duration that must not be zero.
///
/// # Errors
/// Returns what is wrong with the text and how to write a duration.
pub fn parse_positive_duration(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        Duration::ZERO => Err("it must be longer than zero: give at least 1ms".into()),
        duration => Ok(duration),
    }
}

/// Converts microseconds to seconds, as metrics and findings have them.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "the metrics have no other numbers")]
pub fn micros_to_seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

/// Formats a duration in the largest unit of which it is a whole number.
#[must_use]
pub fn format_exact_duration(duration: Duration) -> String {
    const UNITS: [(u128, &str); 5] = [
        (3_600_000_000_000, "h"),
        (60_000_000_000, "m"),
        (1_000_000_000, "s"),
        (1_000_000, "ms"),
        (1_000, "us"),
    ];
    let nanos = duration.as_nanos();
    if nanos == 0 {
        return "0s".into();
    }
    let unit = UNITS.iter().find(|(size, _)| nanos.is_multiple_of(*size));
    unit.map_or_else(|| format!("{nanos}ns"), |(size, name)| format!("{}{name}", nanos / size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_back_as_they_are_written() {
        for text in ["100s", "500ms", "2m", "1h", "90s", "1500us", "0s"] {
            assert_eq!(format_exact_duration(parse_duration(text).unwrap()), text);
        }
        assert_eq!(parse_duration("1m30s").unwrap(), Duration::from_secs(90));
    }

    #[test]
    fn a_duration_without_a_unit_says_so() {
        assert!(parse_duration("100").unwrap_err().contains("no unit"));
        assert!(parse_duration("soon").unwrap_err().contains("no duration"));
        assert!(parse_duration("500 weeks").unwrap_err().contains("longer than a year"));
        assert!(parse_positive_duration("0s").unwrap_err().contains("longer than zero"));
    }
}
