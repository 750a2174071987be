//! The values of a story that are texts: durations, and lists of numbers. Begin at [`StoryDuration`].

use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Deserialize, Deserializer};

use crate::text::{parse_duration, parse_positive_duration};

/// A duration of a story: `500ms`, `10s`, `2m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StoryDuration(pub Duration);

impl<'de> Deserialize<'de> for StoryDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        parse_duration(&text).map(Self).map_err(serde::de::Error::custom)
    }
}

/// A duration that is not zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PositiveStoryDuration(pub Duration);

impl<'de> Deserialize<'de> for PositiveStoryDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        parse_positive_duration(&text).map(Self).map_err(serde::de::Error::custom)
    }
}

/// Numbers in ascending ranges, such as `0-3, 7`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumberRanges(Vec<RangeInclusive<u32>>);

impl NumberRanges {
    const SYNTAX: &str = "write ascending numbers and ranges, such as \"8-15\" or \"0, 4-7\"";

    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no list of numbers: {}", Self::SYNTAX);
        let mut ranges: Vec<RangeInclusive<u32>> = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
            let (first, last) = (number(first)?, number(last)?);
            if first > last || ranges.last().is_some_and(|before| *before.end() >= first) {
                return Err(wrong());
            }
            ranges.push(first..=last);
        }
        Ok(Self(ranges))
    }

    /// Returns the greatest number.
    pub fn last(&self) -> u32 {
        self.0.last().map_or(0, |range| *range.end())
    }

    /// Returns the numbers.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().cloned().flatten()
    }
}

impl<'de> Deserialize<'de> for NumberRanges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}
