//! Formats numbers for people: bytes, counts with their nouns, and lists of numbers as ranges.
//!
//! Durations are in `duration.rs`. Begin at [`format_bytes()`].

/// Formats a number of bytes for people, in binary units.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "for people")]
pub fn format_bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut scaled = count as f64 / 1024.0;
    let mut unit = 0;
    // A value that would be rounded to 1024 is shown in the next unit.
    while scaled >= 1023.95 && unit + 1 < UNITS.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    format!("{scaled:.1} {}", UNITS[unit])
}

/// Formats a whole number with narrow spaces between thousands.
#[must_use]
pub fn format_grouped(number: impl std::fmt::Display) -> String {
    let digits = number.to_string();
    let mut shown = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            shown.push('\u{202f}');
        }
        shown.push(digit);
    }
    shown
}

/// Formats a number with its noun: `1 task`, `2 tasks`, `10 000 tasks`.
#[must_use]
pub fn format_count_with_noun(number: usize, one: &str, many: &str) -> String {
    format!("{} {}", format_grouped(number), if number == 1 { one } else { many })
}

/// Formats numbers as ranges, such as `0-3, 7, 9-11` with `-` as the dash. Of more than `most` ranges the rest is
/// `more`.
#[must_use]
pub fn format_ranges(numbers: impl IntoIterator<Item = i32>, most: usize, dash: &str, more: &str) -> String {
    let mut ranges: Vec<(i32, i32)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let range = |(first, last): &(i32, i32)| {
        if first == last { first.to_string() } else { format!("{first}{dash}{last}") }
    };
    let mut words: Vec<String> = ranges.iter().take(most).map(range).collect();
    if ranges.len() > most {
        words.push(more.to_owned());
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_in_binary_units() {
        let shown = [0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 30, 5 << 40, u64::MAX].map(format_bytes);
        assert_eq!(
            shown,
            ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 GiB", "5.0 TiB", "16384.0 PiB"]
        );
    }

    #[test]
    fn thousands_are_told_apart_and_nouns_agree() {
        assert_eq!(
            [0, 999, 1000, 1_234_567].map(format_grouped),
            ["0", "999", "1\u{202f}000", "1\u{202f}234\u{202f}567"]
        );
        assert_eq!(
            [0, 1, 2].map(|number| format_count_with_noun(number, "task", "tasks")),
            ["0 tasks", "1 task", "2 tasks"]
        );
    }

    #[test]
    fn neighbours_are_one_range() {
        assert_eq!(format_ranges([0, 1, 2, 3, 7, 9, 10], 12, "-", "…"), "0-3, 7, 9-10");
        assert_eq!(format_ranges([0, 1, 3, 5], 2, "–", "…"), "0–1, 3, …");
        assert_eq!(format_ranges([i32::MAX, 0], 2, "-", "…"), "2147483647, 0");
        assert_eq!(format_ranges([], 2, "-", "…"), "");
    }
}
