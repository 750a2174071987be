//! The stories that are part of this program. They are the files in `stories/`.
//!
//! Begin at [`built_in_text`].

const STORIES: [(&str, &str); 6] = [
    ("healthy", include_str!("stories/healthy.toml")),
    ("straggler", include_str!("stories/straggler.toml")),
    ("dead-host", include_str!("stories/dead-host.toml")),
    ("restart-storm", include_str!("stories/restart-storm.toml")),
    ("partition", include_str!("stories/partition.toml")),
    ("held-gpu", include_str!("stories/held-gpu.toml")),
];

/// Returns the names of the stories.
pub fn built_in_names() -> impl Iterator<Item = &'static str> {
    STORIES.iter().map(|(name, _)| *name)
}

/// Returns the text of a story, if there is one of this name.
#[must_use]
pub fn built_in_text(name: &str) -> Option<&'static str> {
    STORIES.iter().find(|(of, _)| *of == name).map(|(_, text)| *text)
}

#[cfg(test)]
mod tests {
    use super::super::story::{Story, StoryOverrides};
    use super::*;

    #[test]
    fn every_story_is_possible_at_every_size() {
        for name in built_in_names() {
            let text = built_in_text(name).unwrap();
            for (tasks, hosts) in [(24, 6), (4, 4), (10_000, 1250), (100_000, 10_000)] {
                let mut story = Story::parse(text).unwrap_or_else(|error| panic!("{name}: {error}"));
                story.apply(StoryOverrides {
                    tasks: Some(tasks),
                    hosts: Some(hosts),
                    ..StoryOverrides::default()
                });
                story.check().unwrap_or_else(|error| panic!("{name} with {tasks} tasks: {error}"));
            }
        }
        assert_eq!(built_in_text("none"), None);
    }
}
