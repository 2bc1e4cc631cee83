//! Pure: moments at which the state machine plans apps again.

use std::collections::{BTreeMap, BTreeSet};

use common::wire::NamespacedName;

use crate::model::cluster_state::UnixMillis;

/// Timers in the order of their moments. An app has one at most.
#[derive(Debug, Default)]
pub(super) struct AppTimers {
    queue: BTreeSet<(UnixMillis, NamespacedName)>,
    by_app: BTreeMap<NamespacedName, UnixMillis>,
}

impl AppTimers {
    /// Returns the moment of the next timer.
    pub(super) fn next_due(&self) -> Option<UnixMillis> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// Replaces the timer of an app; `None`: the app has none any more.
    pub(super) fn set(&mut self, app: &NamespacedName, at: Option<UnixMillis>) {
        if let Some(old) = self.by_app.remove(app) {
            self.queue.remove(&(old, app.clone()));
        }
        if let Some(at) = at {
            self.queue.insert((at, app.clone()));
            self.by_app.insert(app.clone(), at);
        }
    }

    /// Returns true if the name has a timer.
    pub(super) fn is_set(&self, name: &NamespacedName) -> bool {
        self.by_app.contains_key(name)
    }

    /// Removes the first timer if it is due, and returns its name.
    pub(super) fn pop_due(&mut self, now: UnixMillis) -> Option<NamespacedName> {
        self.queue.first().filter(|(at, _)| *at <= now)?;
        let (_, name) = self.queue.pop_first()?;
        self.by_app.remove(&name);
        Some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_app_has_its_latest_timer_only_and_timers_come_in_order() {
        let [one, two] = ["one", "two"].map(|name| NamespacedName::new("default", name));
        let mut timers = AppTimers::default();
        timers.set(&one, Some(UnixMillis(10)));
        timers.set(&two, Some(UnixMillis(20)));
        timers.set(&one, Some(UnixMillis(30)));
        assert!(timers.is_set(&one));
        assert_eq!(timers.next_due(), Some(UnixMillis(20)));
        assert_eq!(timers.pop_due(UnixMillis(19)), None);
        assert_eq!(timers.pop_due(UnixMillis(30)), Some(two));
        timers.set(&one, None);
        assert!(!timers.is_set(&one));
        assert_eq!((timers.pop_due(UnixMillis(30)), timers.next_due()), (None, None));
    }
}
