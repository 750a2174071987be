//! Computes from a story and its seed which action comes when, and for which tasks. It does no IO and reads no clock.
//!
//! `cluster.rs` carries the actions out. Begin at [`Schedule::new`].

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use super::layout::ClusterLayout;
use super::story::{Story, StoryAction, StoryEvent};

/// The action of a simulated task at a moment of the story.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaskAction {
    /// It arrives later by this time at each barrier, for a time or until the end.
    Late {
        /// The time that is added to each step.
        by: Duration,
        /// How long this lasts.
        lasts: Option<Duration>,
    },
    /// It sends heartbeats, and does not arrive at the barrier.
    Hang {
        /// How long this lasts.
        lasts: Option<Duration>,
    },
    /// It sends nothing.
    Silence {
        /// How long this lasts.
        lasts: Option<Duration>,
    },
    /// Its connection is reset.
    Kill,
    /// Its connection is reset, and it registers again after this time.
    Restart {
        /// The time until it registers again.
        after: Duration,
    },
    /// It shuts down in good order.
    Stop,
    /// Its GPU begins no further collective.
    HoldGpu {
        /// How long this lasts.
        lasts: Option<Duration>,
    },
    /// It reports an error and ends.
    ReportError {
        /// The message.
        message: Arc<str>,
    },
}

impl TaskAction {
    fn of_event(event: &StoryEvent) -> Self {
        let lasts = event.lasts.map(|lasts| lasts.0);
        match event.what {
            StoryAction::Late => Self::Late { by: event.by.map_or(Duration::ZERO, |by| by.0), lasts },
            StoryAction::Hang => Self::Hang { lasts },
            StoryAction::HoldGpu => Self::HoldGpu { lasts },
            StoryAction::Silence | StoryAction::Partition => Self::Silence { lasts },
            StoryAction::Kill => Self::Kill,
            StoryAction::Restart => {
                Self::Restart { after: event.after.map_or(Duration::ZERO, |after| after.0) }
            }
            StoryAction::Stop => Self::Stop,
            StoryAction::Error => {
                let message = event.message.as_deref().unwrap_or("a simulated error");
                Self::ReportError { message: message.into() }
            }
        }
    }

    /// Returns whether it ends the connection of the task.
    #[must_use]
    pub const fn resets_connection(&self) -> bool {
        matches!(self, Self::Kill | Self::Restart { .. })
    }

    /// Returns whether calls of tasks may fail because of it.
    #[must_use]
    pub const fn is_disruptive(&self) -> bool {
        !matches!(self, Self::Late { .. } | Self::HoldGpu { .. })
    }
}

/// An action at its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScheduledAction {
    /// The time since all tasks had registered.
    pub at: Duration,
    /// Its name in the story.
    pub what: StoryAction,
    /// The action of each task.
    pub action: TaskAction,
    /// The interval at which it repeats.
    pub every: Option<Duration>,
    /// The tasks, ascending.
    pub tasks: Arc<[u32]>,
    /// The hosts of which all tasks are among these.
    pub hosts: Arc<[u32]>,
}

/// The actions of a story, in the order of their times. If events repeat, it has no end.
#[derive(Debug)]
pub struct Schedule {
    /// The first action of each event.
    events: Vec<ScheduledAction>,
    /// The next time of each event. Of equal times, the event that comes first in the story is first.
    next: BinaryHeap<Reverse<(Duration, usize)>>,
}

impl Schedule {
    /// Computes the schedule of a story that has been checked.
    #[must_use]
    pub fn new(story: &Story) -> Self {
        let layout = story.layout();
        let scheduled = |(number, event): (usize, &StoryEvent)| {
            let tasks = select_tasks(event, layout, story.seed, number);
            ScheduledAction {
                at: event.at.0,
                what: event.what,
                action: TaskAction::of_event(event),
                every: event.every.map(|every| every.0),
                hosts: layout.whole_hosts(&tasks).into(),
                tasks: tasks.into(),
            }
        };
        let next = story.events.iter().enumerate().map(|(number, event)| Reverse((event.at.0, number)));
        Self { next: next.collect(), events: story.events.iter().enumerate().map(scheduled).collect() }
    }

    /// Returns the sets of tasks whose connections an event resets at the same time.
    pub fn tasks_killed_together(&self) -> impl Iterator<Item = &[u32]> {
        self.events.iter().filter(|event| event.action.resets_connection()).map(|event| &*event.tasks)
    }

    /// Returns the first action of each event, in the order of the story.
    #[must_use]
    pub fn first_actions(&self) -> &[ScheduledAction] {
        &self.events
    }

    /// Returns the time of the next action.
    #[must_use]
    pub fn next_at(&self) -> Option<Duration> {
        self.next.peek().map(|Reverse((at, _))| *at)
    }
}

impl Iterator for Schedule {
    type Item = ScheduledAction;

    fn next(&mut self) -> Option<ScheduledAction> {
        let Reverse((at, number)) = self.next.pop()?;
        let event = self.events.get(number)?;
        if let Some(again) = event.every.and_then(|every| at.checked_add(every)) {
            self.next.push(Reverse((again, number)));
        }
        Some(ScheduledAction { at, ..event.clone() })
    }
}

/// Returns the tasks of an event, ascending. `number` is that of the event, so that events draw different hosts.
fn select_tasks(event: &StoryEvent, layout: ClusterLayout, seed: u64, number: usize) -> Vec<u32> {
    if let Some(tasks) = &event.tasks {
        return tasks.numbers().collect();
    }
    let hosts: Vec<u32> = match (&event.hosts, event.random_hosts) {
        (Some(hosts), _) => hosts.numbers().collect(),
        (None, Some(many)) => {
            let mut random = fastrand::Rng::with_seed(seed.wrapping_add((number as u64) << 32));
            let mut hosts = random.choose_multiple(0..layout.hosts, many as usize);
            hosts.sort_unstable();
            hosts
        }
        (None, None) => Vec::new(),
    };
    hosts.into_iter().flat_map(|host| layout.tasks_of_host(host)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn story(events: &str, seed: u64) -> Story {
        let text = format!("description = \"d\"\ntasks = 40\nhosts = 10\nseed = {seed}\n{events}");
        let story = Story::parse(&text).unwrap();
        story.check().unwrap();
        story
    }

    #[test]
    fn actions_come_in_the_order_of_their_times() {
        let events = "
            [[events]]
            at = \"10s\"
            every = \"5s\"
            what = \"restart\"
            after = \"1s\"
            hosts = \"3\"
            [[events]]
            at = \"15s\"
            what = \"kill\"
            tasks = \"0-1, 7\"";
        let schedule = Schedule::new(&story(events, 0));
        let killed: Vec<_> = schedule.tasks_killed_together().map(<[u32]>::to_vec).collect();
        assert_eq!(killed, [vec![12, 13, 14, 15], vec![0, 1, 7]]);
        assert_eq!(schedule.next_at(), Some(Duration::from_secs(10)));
        let seen: Vec<_> = schedule.take(4).map(|next| (next.at.as_secs(), next.what.name())).collect();
        assert_eq!(seen, [(10, "restart"), (15, "restart"), (15, "kill"), (20, "restart")]);
    }

    #[test]
    fn an_action_names_the_hosts_that_it_has_whole() {
        let events = "[[events]]\nat = \"1s\"\nwhat = \"hang\"\ntasks = \"3-8\"";
        let action = Schedule::new(&story(events, 0)).next().unwrap();
        assert_eq!((&*action.tasks, &*action.hosts), (&[3, 4, 5, 6, 7, 8][..], &[1][..]));
        assert_eq!(action.action, TaskAction::Hang { lasts: None });
    }

    proptest! {
        #[test]
        fn the_seed_alone_decides_what_is_random(seed in any::<u64>(), many in 1..=10_u32) {
            let event = format!("[[events]]\nat = \"1s\"\nevery = \"1s\"\nwhat = \"kill\"\nrandom-hosts = {many}\n");
            let story = story(&event.repeat(2), seed);
            let all: Vec<_> = Schedule::new(&story).take(6).collect();
            prop_assert_eq!(&all, &Schedule::new(&story).take(6).collect::<Vec<_>>());
            prop_assert!(all.is_sorted_by_key(|action| action.at));
            for action in &all {
                prop_assert_eq!(action.hosts.len(), many as usize);
                prop_assert_eq!(action.tasks.len(), 4 * many as usize);
                prop_assert!(action.tasks.is_sorted());
            }
            prop_assert_eq!(&all[0].tasks, &all[2].tasks, "a repeated event has the same tasks");
        }
    }
}
