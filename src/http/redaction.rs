//! Decides which values of the key-value store are hidden, by patterns of their keys.
//!
//! Handlers check the patterns before they show a value. Begin at `RedactionPatterns::is_redacted`.

use std::fmt;

/// Patterns of keys whose values are not shown. `*` stands for any text, slashes too, and `?` for one byte.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct RedactionPatterns(Vec<String>);

impl RedactionPatterns {
    /// The text for an empty list of patterns.
    const NONE: &str = "none";

    /// Parses patterns separated by commas, or `none`.
    ///
    /// # Errors
    /// If a pattern is empty.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == Self::NONE {
            return Ok(Self::default());
        }
        let patterns: Vec<String> =
            text.split(',').map(|pattern| pattern.trim().trim_matches('/').to_owned()).collect();
        if patterns.iter().any(String::is_empty) {
            return Err(
                "write patterns of keys, parted by commas, such as 'secrets/*,*token*', or none".into()
            );
        }
        Ok(Self(patterns))
    }

    /// Returns whether the value of this key is hidden.
    #[must_use]
    pub fn is_redacted(&self, key: &[u8]) -> bool {
        self.0.iter().any(|pattern| pattern_matches(pattern.as_bytes(), key))
    }
}

impl fmt::Display for RedactionPatterns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str(Self::NONE) } else { f.write_str(&self.0.join(",")) }
    }
}

/// Returns whether a pattern matches a whole text. The time is at most proportional to the product of both
/// lengths.
fn pattern_matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut from) = (0, 0);
    // The position after the last star, and how much of the text that star matches.
    let mut star: Option<(usize, usize)> = None;
    while from < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, from));
                at += 1;
            }
            Some(byte) if *byte == b'?' || *byte == text[from] => (at, from) = (at + 1, from + 1),
            _ => match star {
                Some((place, given)) => {
                    star = Some((place, given + 1));
                    (at, from) = (place + 1, given + 1);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_is_any_text_and_a_pattern_matches_the_whole_key() {
        let hides = |patterns: &str, key: &str| {
            RedactionPatterns::parse(patterns).unwrap().is_redacted(key.as_bytes())
        };
        assert!(hides("secrets/*", "secrets/a/b") && !hides("secrets/*", "secrets"));
        assert!(hides("a, *token* ", "x/my-token/1") && !hides("token", "tokens"));
        assert!(hides("k?y", "key") && !hides("k?y", "ky"));
        assert!(hides("*a*b*c", "xxaxxbxxabc") && !hides("*a*b*c", "xxaxxbxxab"));
        assert!(!hides("none", "none"));
        assert!(RedactionPatterns::parse("a,,b").is_err() && RedactionPatterns::parse("").is_err());
        assert_eq!(RedactionPatterns::parse("a,b/").unwrap().to_string(), "a,b");
    }
}
