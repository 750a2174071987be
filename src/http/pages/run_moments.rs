//! The moments of a run in the picture of its states, and where their texts are drawn.
//!
//! `state_chart.rs` draws them. Begin at [`with_texts_apart`].

/// The width of a letter, in units of the picture.
const LETTER_WIDTH: usize = 7;

/// A moment of the run.
pub(super) struct RunMoment {
    pub x: usize,
    /// Empty, if the text of another moment says it.
    pub text: String,
}

impl RunMoment {
    /// Returns whether its text is so near to the end of the picture that it must end at the moment.
    pub const fn ends_at_moment(&self) -> bool {
        self.x > 800
    }

    /// Returns where its text is drawn, in units of the picture.
    fn extent(&self) -> std::ops::Range<usize> {
        let width = self.text.chars().count() * LETTER_WIDTH;
        if self.ends_at_moment() { self.x.saturating_sub(width)..self.x } else { self.x..self.x + width }
    }
}

/// Joins the texts of moments that would be drawn over one another: the first one says all.
pub(super) fn with_texts_apart(mut moments: Vec<RunMoment>) -> Vec<RunMoment> {
    moments.sort_by_key(|moment| moment.x);
    let mut last: Option<usize> = None;
    for at in 0..moments.len() {
        match last {
            Some(before) if moments[before].extent().end > moments[at].extent().start => {
                let text = std::mem::take(&mut moments[at].text);
                moments[before].text += &format!("; {text}");
            }
            _ => last = Some(at),
        }
    }
    moments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_would_overlap_are_one() {
        let moment = |(x, text): (usize, &str)| RunMoment { x, text: text.to_owned() };
        let drawn = |moments: &[(usize, &str)]| -> Vec<(usize, String)> {
            let apart = with_texts_apart(moments.iter().copied().map(moment).collect());
            apart.into_iter().map(|moment| (moment.x, moment.text)).collect()
        };
        let all = [(0, "registered"), (500, "first cause: task 3"), (501, "run ended")];
        let wanted = [(0, "registered"), (500, "first cause: task 3; run ended"), (501, "")];
        assert_eq!(drawn(&all), wanted.map(|(x, text)| (x, text.to_owned())));
        // Near the end, texts are drawn to the left of their moments.
        let end = [(990, "drain"), (1000, "run ended")];
        assert_eq!(drawn(&end), [(990, "drain; run ended".to_owned()), (1000, String::new())]);
        let far = [(100, "drain"), (900, "run ended")];
        assert_eq!(drawn(&far), far.map(|(x, text)| (x, text.to_owned())));
        // One to the right of its moment, and one to the left: they meet in the middle.
        assert_eq!(drawn(&[(795, "first cause"), (810, "run ended")])[1].1, "");
    }
}
