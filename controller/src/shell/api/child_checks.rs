//! Pure: times at which an app's planned objects are looked for.

use std::collections::{BTreeMap, BTreeSet};

use common::wire::NamespacedName;

use crate::model::cluster_state::UnixMillis;

/// Time after planning at which an app's objects are looked for, and between checks while one is missing.
const CHECK_DELAY_MS: u64 = 8000;

/// Apps whose child objects should exist soon, by the time of their next check.
#[derive(Debug, Default)]
pub struct ChildCheckSchedule {
    due: BTreeSet<(UnixMillis, NamespacedName)>,
    due_by_app: BTreeMap<NamespacedName, UnixMillis>,
}

impl ChildCheckSchedule {
    /// Schedules a check of an app whose objects were planned. A check that is already due earlier stays.
    pub fn schedule(&mut self, app: NamespacedName, now: UnixMillis) {
        let at = now.plus_ms(CHECK_DELAY_MS);
        // Pushing the check back at each change would never check an app that changes all the time.
        if *self.due_by_app.entry(app.clone()).or_insert(at) == at {
            self.due.insert((at, app));
        }
    }

    /// Removes and returns the next app whose check is due.
    pub fn next_due(&mut self, now: UnixMillis) -> Option<NamespacedName> {
        let is_due = self.due.first().is_some_and(|(at, _)| *at <= now);
        let (_, app) = if is_due { self.due.pop_first()? } else { return None };
        self.due_by_app.remove(&app);
        Some(app)
    }

    /// Returns the time of the next check.
    pub fn next_at(&self) -> Option<UnixMillis> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Drops all checks, since another replica is the leader now.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_app_is_checked_once_within_ten_seconds_however_often_it_changes() {
        let mut schedule = ChildCheckSchedule::default();
        let app = |own: &str| NamespacedName::new("default", own);
        for ms in 0..100 {
            schedule.schedule(app("a"), UnixMillis(ms));
        }
        schedule.schedule(app("b"), UnixMillis(50));
        assert_eq!(schedule.next_due(UnixMillis(CHECK_DELAY_MS - 1)), None);
        assert_eq!(schedule.next_at(), Some(UnixMillis(CHECK_DELAY_MS)));
        let now = UnixMillis(CHECK_DELAY_MS + 50);
        assert_eq!(
            [schedule.next_due(now), schedule.next_due(now)],
            [Some(app("a")), Some(app("b"))]
        );
        assert_eq!((schedule.next_due(now), schedule.next_at()), (None, None));
        schedule.schedule(app("a"), now);
        assert_eq!(schedule.next_at(), Some(now.plus_ms(CHECK_DELAY_MS)), "again");
    }
}
