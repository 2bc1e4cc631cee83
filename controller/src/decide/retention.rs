//! Pure: garbage collection of Revisions that are too old to keep (`config-gc`; knative/serving
//! `pkg/reconciler/gc/gc.go` at 98e5ef9).

use std::time::Duration;

use crate::model::{
    cluster_state::{RoutingState, UnixMillis},
    config_maps::GcConfig,
};

/// One Revision, with everything that decides if it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GcCandidate<'a> {
    /// Name of the Revision, without its namespace.
    pub name: &'a str,
    /// Creation time of the Revision.
    pub created: UnixMillis,
    /// Routing state of the Revision: if a Route names it.
    pub routing: RoutingState,
    /// Time of the last change of the routing state, at least the creation.
    pub last_active: UnixMillis,
    /// True if it is never selected: it is already deleted, is the Configuration's newest one, or has the annotation
    /// `serving.knative.dev/no-gc: "true"`, in any case of letters. Its pods do not matter, as in Knative.
    pub is_gc_exempt: bool,
    /// True if it is its Configuration's latest ready Revision.
    pub is_latest_ready: bool,
}

impl GcCandidate<'_> {
    /// Returns true if the Revision must stay. One without a routing state has not been compared with Routes and stays.
    fn must_stay(&self) -> bool {
        self.is_latest_ready || self.is_gc_exempt || self.routing != RoutingState::Reserve
    }

    /// Returns the moment at which it is old enough to be deleted; `None`: it is never deleted for its age.
    fn stale_at(&self, config: &GcConfig) -> Option<UnixMillis> {
        let after = |from: UnixMillis, keep: Option<Duration>| {
            keep.map(|it| from.plus_ms(u64::try_from(it.as_millis()).unwrap_or(u64::MAX)))
        };
        let created = after(self.created, config.since_created);
        // `None` is less than `Some`: a limit that is off leaves the other one, as in Knative.
        let active = after(self.last_active, config.since_active);
        created.max(active)
    }
}

/// Revisions to delete now, and the time of the next check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GcSelection<'a> {
    /// Names of the Revisions to delete: first those that are old enough, then those beyond the maximum; each part by
    /// last use.
    pub delete: Vec<&'a str>,
    /// Moment of the next check, if nothing happens before; `None`: time alone changes nothing.
    pub next_check: Option<UnixMillis>,
}

/// Selects the Revisions of one Configuration that are deleted now.
pub fn select_collectable<'a>(
    revisions: &[GcCandidate<'a>],
    config: &GcConfig,
    now: UnixMillis,
) -> GcSelection<'a> {
    let min = usize::try_from(config.min_non_active).unwrap_or(usize::MAX);
    let off =
        (config.max_non_active, config.since_created, config.since_active) == (None, None, None);
    if off || revisions.len() <= min {
        return GcSelection::default();
    }
    let mut idle: Vec<_> = revisions.iter().filter(|it| !it.must_stay()).collect();
    if idle.len() <= min {
        return GcSelection::default();
    }
    idle.sort_by_key(|it| (it.last_active, it.created, it.name));
    // `min` counts idle Revisions only: those in use stay in any case.
    let max_deleted = idle.len() - min;
    let aged = |it: &&&GcCandidate<'_>| it.stale_at(config).is_some_and(|at| at <= now);
    let mut delete: Vec<&str> =
        idle.iter().filter(aged).take(max_deleted).map(|it| it.name).collect();
    if delete.len() == max_deleted {
        return GcSelection { delete, next_check: None };
    }
    idle.retain(|it| !delete.contains(&it.name));
    // Age alone may keep more than `max` Revisions: the oldest beyond that number go whatever their age.
    let max = config.max_non_active.and_then(|max| usize::try_from(max).ok()).unwrap_or(usize::MAX);
    let beyond = idle.len().saturating_sub(max);
    delete.extend(idle.drain(..beyond).map(|it| it.name));
    let later = idle.iter().filter_map(|it| it.stale_at(config));
    // With `min` or fewer idle Revisions left no passing of time deletes another one.
    let next = later.min().filter(|_| idle.len() > min);
    GcSelection { delete, next_check: next }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3_600_000;
    const NOW: UnixMillis = UnixMillis(1000 * HOUR);

    /// Makes a Revision that was created and last used the given number of hours ago.
    fn old(name: &str, created: u64, active: u64) -> GcCandidate<'_> {
        GcCandidate {
            name,
            created: UnixMillis(NOW.0 - created * HOUR),
            routing: RoutingState::Reserve,
            last_active: UnixMillis(NOW.0 - active * HOUR),
            is_gc_exempt: false,
            is_latest_ready: false,
        }
    }

    fn config(created: Option<u64>, active: Option<u64>, min: u64, max: Option<u64>) -> GcConfig {
        let hours = |it: Option<u64>| it.map(|it| Duration::from_secs(it * 3600));
        GcConfig {
            since_created: hours(created),
            since_active: hours(active),
            min_non_active: min,
            max_non_active: max,
        }
    }

    fn gone<'a>(revisions: &[GcCandidate<'a>], config: &GcConfig) -> Vec<&'a str> {
        select_collectable(revisions, config, NOW).delete
    }

    #[test]
    fn the_oldest_go_until_the_least_number_is_left() {
        let all = [old("c", 70, 30), old("a", 90, 50), old("b", 80, 40), old("new", 1, 1)];
        for (config, expected) in [
            (config(Some(48), Some(15), 0, None), &["a", "b", "c"][..]),
            (config(Some(48), Some(15), 2, None), &["a", "b"]),
            (config(Some(48), Some(15), 3, None), &["a"]),
            (config(Some(48), Some(15), 4, None), &[]),
            (config(Some(75), None, 0, None), &["a", "b"]),
            (config(None, Some(45), 0, None), &["a"]),
            (config(Some(85), Some(35), 0, None), &["a"]),
            (config(None, None, 0, None), &[]),
            (config(None, None, 0, Some(1)), &["a", "b", "c"]),
            (config(None, None, 0, Some(3)), &["a"]),
            (config(Some(85), None, 1, Some(2)), &["a", "b"]),
            (config(Some(0), Some(0), 0, Some(1000)), &["a", "b", "c", "new"]),
        ] {
            assert_eq!(gone(&all, &config), expected, "{config:?}");
        }
    }

    #[test]
    fn what_is_in_use_or_kept_stays_and_does_not_count_as_idle() {
        let all = [
            GcCandidate { is_latest_ready: true, ..old("ready", 99, 99) },
            GcCandidate { is_gc_exempt: true, ..old("kept", 99, 99) },
            GcCandidate { routing: RoutingState::Active, ..old("routed", 99, 99) },
            GcCandidate { routing: RoutingState::Pending, ..old("unseen", 99, 99) },
            old("a", 99, 99),
            old("b", 98, 98),
        ];
        assert_eq!(gone(&all, &config(Some(1), Some(1), 0, None)), ["a", "b"]);
        assert_eq!(gone(&all, &config(Some(1), Some(1), 1, None)), ["a"]);
        assert_eq!(gone(&all, &config(Some(1), Some(1), 2, None)), [] as [&str; 0]);
    }

    #[test]
    fn returns_when_the_next_revision_will_be_old_enough() {
        let all = [old("a", 40, 14), old("b", 47, 14)];
        let selection = select_collectable(&all, &config(Some(48), Some(15), 0, None), NOW);
        assert_eq!(
            selection,
            GcSelection { delete: vec![], next_check: Some(UnixMillis(NOW.0 + HOUR)) }
        );
        let then = select_collectable(
            &all,
            &config(Some(48), Some(15), 0, None),
            UnixMillis(NOW.0 + HOUR),
        );
        let expected =
            GcSelection { delete: vec!["b"], next_check: Some(UnixMillis(NOW.0 + 8 * HOUR)) };
        assert_eq!(then, expected);
        let enough = select_collectable(&all, &config(Some(48), Some(15), 2, None), NOW);
        assert_eq!(enough, GcSelection::default());
        assert_eq!(select_collectable(&all, &config(None, None, 0, Some(9)), NOW).next_check, None);
    }

    #[test]
    fn thousands_of_revisions_are_bounded_by_the_greatest_number() {
        let names: Vec<String> = (0..1500).map(|it| format!("r-{it:05}")).collect();
        let all: Vec<_> = names.iter().map(|it| old(it, 1, 1)).collect();
        let delete = gone(&all, &GcConfig::default());
        assert_eq!(delete.len(), 500);
        assert!(delete.iter().copied().eq(names.iter().take(500).map(String::as_str)));
    }
}
